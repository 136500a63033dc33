"""Chooses the trajectories and pictures that go into a report, within a number of bytes."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opensearch_lightning.dashboards.page_json import page_json
from opensearch_lightning.dashboards.records import outcome
from opensearch_lightning.errors import DataError

MAX_TRAJECTORIES = 600
MAX_TEXT = 20_000
"""Characters of one text (an observation, a stretch of prompt) that the page shows."""
_VERBATIM_BYTES = 48_000
_LONGEST_SIDE = 640
_IMAGE_NAME = re.compile(r"[0-9a-f]{16,64}\.(png|jpg|gif|webp|bmp)")
_FORMATS = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp"}


@dataclass(kw_only=True)
class Selection:
    """What the page's trajectory browser gets.

    ``images`` maps a picture's file name to its data URL and its size in pixels. ``found`` counts the trajectories on
    disk, of which ``trajectories`` may be a part. ``notes`` name what could not be read.
    """

    trajectories: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: int = 0
    notes: list[str] = field(default_factory=list)


def select_trajectories(directories: Mapping[str, Path], max_bytes: int) -> Selection:
    """Trajectories of each run's ``trajectories`` folder, spread over the steps, at most ``max_bytes`` of page.

    Args:
        directories: folder with the JSON Lines files, by run name.
        max_bytes: bytes of JSON and pictures to stay within.
    """
    selection = Selection()
    queues = []
    for run, directory in directories.items():
        queues += [deque(_groups(run, path, selection)) for path in _spread(sorted(directory.glob("*.jsonl")))]
    left = max_bytes
    for group in _round_robin(queues):
        size, images = _cost(group, selection, left)
        if size > left or len(selection.trajectories) + len(group) > MAX_TRAJECTORIES:
            continue
        left -= size
        selection.images.update(images)
        selection.trajectories.extend(trajectory for _, trajectory in group)
    if not selection.found:
        selection.notes.append(f"No trajectories: none in {', '.join(map(str, directories.values())) or 'no run'}")
    runs = list(directories)
    selection.trajectories.sort(key=lambda item: (runs.index(item["run"]), item["split"], item["step"]))
    return selection


Group = list[tuple[Path, dict[str, Any]]]
"""Trajectories of one task in one file, each with the folder of its pictures."""


def _groups(run: str, path: Path, selection: Selection) -> Iterator[Group]:
    """The groups of one file; what cannot be read becomes a note."""
    trajectories, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            trajectories.append(_for_page(run, json.loads(line, parse_constant=str)))
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += bool(line.strip())
    if bad:
        selection.notes.append(f"{run}: {bad} unreadable line{'s' if bad > 1 else ''} in {path.name}")
    selection.found += len(trajectories)
    for _, group in itertools.groupby(trajectories, key=lambda item: item["task_id"]):
        yield [(path.parent / "images", trajectory) for trajectory in group]


def _for_page(run: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as the page reads it: long texts cut, tokens joined to segments."""
    steps = [dict(step) for step in record["steps"]]
    for step in steps:
        step["text"] = _cut(step["text"])
        if step["observation"] is not None:
            step["observation"] = {**step["observation"], "text": _cut(step["observation"]["text"])}
    return {
        **record,
        "run": run,
        "step": int(record["step"]),
        "split": str(record["split"]),
        "outcome": outcome(record),
        "steps": steps,
        "images": [{"name": str(image["name"]), "file": str(image["file"])} for image in record["images"]],
        "tokens": _segments(record["tokens"]),
    }


def _segments(tokens: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """``[step, carries gradient, texts]`` for each run of tokens with one owner and mask.

    Texts are the tokens where the policy sampled them, and one joined text elsewhere.
    """
    segments = []
    for (step, kept), run in itertools.groupby(tokens, key=lambda token: (int(token[1]), bool(token[2]))):
        texts = [str(token[0]) for token in run]
        segments.append([step, int(kept), texts if step >= 0 else [_cut("".join(texts))]])
    return segments


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out of this page …]\n{text[-half:]}"


def _cost(group: Group, selection: Selection, left: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """Bytes that a group adds to the page, and its pictures that the page does not have yet."""
    size = len(page_json([trajectory for _, trajectory in group]))
    images: dict[str, dict[str, Any]] = {}
    for directory, trajectory in group:
        for image in trajectory["images"]:
            name = image["file"]
            if size > left or name in selection.images or name in images:
                continue
            picture = _picture(directory, name)
            if picture is not None:
                images[name] = picture
                size += len(page_json({name: picture}))
    return size, images


def _picture(directory: Path, name: str) -> dict[str, Any] | None:
    """Data URL and size of a picture; ``None`` when there is no readable one under that name."""
    from opensearch_lightning.pictures import as_rgb, open_picture

    path = directory / name
    if not _IMAGE_NAME.fullmatch(name) or not path.is_file():
        return None
    try:
        encoded = path.read_bytes()
        image = open_picture(encoded)
        width, height = image.size
        kind = _FORMATS.get(image.format or "")
        if kind is None or len(encoded) > _VERBATIM_BYTES:
            small = as_rgb(image)
            width, height = small.size
            small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=82)
            encoded, kind = buffer.getvalue(), "jpeg"
    except (OSError, ValueError, SyntaxError, DataError):
        return None
    return {
        "src": f"data:image/{kind};base64,{base64.b64encode(encoded).decode('ascii')}",
        "width": width,
        "height": height,
    }


def _spread(files: Sequence[Path]) -> list[Path]:
    """Last, first, middle, then the middles between: whatever prefix of it is taken spans the run."""
    if len(files) < 2:
        return list(files)
    order, spans = [files[-1], files[0]], deque([(0, len(files) - 1)])
    while spans:
        low, high = spans.popleft()
        middle = (low + high) // 2
        if middle > low:
            order.append(files[middle])
            spans += [(low, middle), (middle, high)]
    return order


def _round_robin(queues: Sequence[deque[Group]]) -> Iterator[Group]:
    while any(queues):
        for queue in queues:
            if queue:
                yield queue.popleft()
