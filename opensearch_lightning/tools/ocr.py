"""Local OCR without a layout model: lines put into reading order and paragraphs by where they stand."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from opensearch_lightning.tools.layout import Block, Layout
from opensearch_lightning.tools.text_lines import Line, LineReader, same_row

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Block", "Layout", "LayoutReader", "Line", "layout_blocks", "rows_in_order"]

_TITLE_HEIGHT = 1.4
_PARAGRAPH_GAP = 0.9
# Narrower columns, in line heights, are cells of a table: read along the row.
_COLUMN_WIDTH = 6.0


class LayoutReader:
    """Reads images with RapidOCR (PP-OCR models from its wheel). Safe to share by threads.

    Args:
        min_line_height: lower lines, in pixels of the image, are not read: too many characters come out wrong.
        engines: images read at once; each engine holds its own models, made when first needed, and one thread.

    Raises:
        ConfigurationError: ``engines`` below 1.
    """

    def __init__(self, *, min_line_height: float = 14.0, engines: int = 1) -> None:
        self.engines = engines
        self._min_line_height = min_line_height
        self._lines = LineReader(engines)

    def read(self, image: Image.Image, *, any_orientation: bool = False) -> Layout:
        """Text of an RGB image; with ``any_orientation`` of the quarter turn of it that reads best."""
        lines, _, turned = self._lines.read_turned(image, any_orientation=any_orientation)
        tall = [line for line in lines if line.height >= self._min_line_height]
        return Layout(blocks=tuple(layout_blocks(tall)), too_small=len(lines) - len(tall), turned=turned)


def layout_blocks(lines: list[Line]) -> list[Block]:
    """Lines in reading order, joined to paragraphs: columns from left to right, each from top to bottom; what spans the
    columns comes where it stands.
    """
    if not lines:
        return []
    usual = statistics.median(line.height for line in lines)
    blocks: list[list[Line]] = []
    for row in rows_in_order(lines, usual):
        joined = _join(row, " ")
        if blocks and _continues(blocks[-1][-1], joined, usual):
            blocks[-1].append(joined)
        else:
            blocks.append([joined])
    return [_block(block, usual) for block in blocks]


def rows_in_order(lines: list[Line], usual: float) -> list[list[Line]]:
    """Rows of lines, by recursive cuts (XY-cut): first between columns, else below the topmost row.

    ``usual`` is the height of a usual line in pixels.
    """
    if not lines:
        return []
    column = _column_cut(lines, usual)
    if column is not None:
        left = [line for line in lines if line.right <= column]
        right = [line for line in lines if line.left >= column]
        return rows_in_order(left, usual) + rows_in_order(right, usual)
    highest = min(lines, key=lambda line: (line.top, line.left))
    row = [line for line in lines if same_row(highest, line)]
    rest = [line for line in lines if not same_row(highest, line)]
    return [sorted(row, key=lambda line: line.left), *rows_in_order(rest, usual)]


def _column_cut(lines: list[Line], usual: float) -> float | None:
    """Where a white band of at least one line height stands between two columns of two lines or more, if anywhere."""
    ordered = sorted(lines, key=lambda line: line.left)
    reach = ordered[0].right
    for count, line in enumerate(ordered[1:], start=1):
        left, right = ordered[:count], ordered[count:]
        if line.left - reach >= usual and min(len(left), len(right)) >= 2 and all(map(_is_column, (left, right))):
            return line.left
        reach = max(reach, line.right)
    return None


def _is_column(lines: list[Line]) -> bool:
    return statistics.median((line.right - line.left) / line.height for line in lines) >= _COLUMN_WIDTH


def _continues(above: Line, below: Line, usual: float) -> bool:
    """Whether ``below`` goes on with the paragraph of ``above``: close under it, and of like height."""
    gap = below.top - above.bottom
    alike = max(above.height, below.height) < _TITLE_HEIGHT * min(above.height, below.height)
    beside = min(above.right, below.right) > max(above.left, below.left)
    return -usual < gap <= _PARAGRAPH_GAP * usual and alike and beside


def _join(lines: list[Line], separator: str) -> Line:
    return Line(
        left=min(line.left for line in lines),
        top=min(line.top for line in lines),
        right=max(line.right for line in lines),
        bottom=max(line.bottom for line in lines),
        text=separator.join(line.text for line in lines),
    )


def _block(lines: list[Line], usual: float) -> Block:
    whole = _join(lines, " ")
    is_title = statistics.median(line.height for line in lines) >= _TITLE_HEIGHT * usual
    box = (whole.left, whole.top, whole.right, whole.bottom)
    return Block(label="title" if is_title else "text", content=whole.text, box=box)
