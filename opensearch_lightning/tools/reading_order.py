"""In which order the boxes of a page are read: recursive cuts along white bands (XY-cut), which knows columns.

A box is (left, top, right, bottom) in pixels, y down.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Box = tuple[float, float, float, float]

_X, _Y = 0, 1


def reading_order(boxes: Sequence[Box], *, titles: Collection[int] = (), tolerance: float = 0.0) -> list[int]:
    """Indices of the boxes in reading order.

    White bands across the page part it into strips. A strip with boxes side by side begins columns, and the strips
    below belong to them for as long as a white band still runs down between them; so columns are read one after the
    other, and what spans them where it stands.

    Args:
        boxes: any, overlapping ones too.
        titles: indices of boxes that begin what stands below them: at the foot of the columns they are read after them.
        tolerance: pixels by which boxes on the two sides of a white band may overlap.

    Returns:
        Each index once.
    """
    return _order(list(range(len(boxes))), boxes, frozenset(titles), tolerance)


def _order(some: list[int], boxes: Sequence[Box], titles: frozenset[int], tolerance: float) -> list[int]:
    order: list[int] = []
    while len(some) > 1:
        parts = _runs(_parts(some, boxes, _Y, tolerance), boxes, titles, tolerance)
        if len(parts) == 1:
            parts = _parts(some, boxes, _X, tolerance)
        if len(parts) > 1:
            return [*order, *(index for part in parts for index in _order(part, boxes, titles, tolerance))]
        first = min(some, key=lambda index: (boxes[index][1], boxes[index][0], index))
        order.append(first)
        some = [index for index in some if index != first]
    return [*order, *some]


def _parts(some: Sequence[int], boxes: Sequence[Box], axis: int, tolerance: float) -> list[list[int]]:
    """The boxes between white bands: columns along x, strips along y, in the direction of the axis."""
    ordered = sorted(some, key=lambda index: (boxes[index][axis], boxes[index][axis + 2], index))
    parts = [[ordered[0]]]
    reach = boxes[ordered[0]][axis + 2]
    for index in ordered[1:]:
        start, end = boxes[index][axis], boxes[index][axis + 2]
        if start >= reach - tolerance:
            parts.append([])
        parts[-1].append(index)
        reach = max(reach, end)
    return parts


def _runs(strips: list[list[int]], boxes: Sequence[Box], titles: frozenset[int], tolerance: float) -> list[list[int]]:
    """Strips that are read on their own, and strips joined to the columns that they form together."""
    runs: list[list[int]] = []
    at = 0
    while at < len(strips):
        end = at + 1
        if len(_parts(strips[at], boxes, _X, tolerance)) > 1:
            joined = list(strips[at])
            while end < len(strips) and len(_parts([*joined, *strips[end]], boxes, _X, tolerance)) > 1:
                joined += strips[end]
                end += 1
            while end < len(strips) and end > at + 1 and titles.issuperset(strips[end - 1]):
                end -= 1
        runs.append([index for strip in strips[at:end] for index in strip])
        at = end
    return runs
