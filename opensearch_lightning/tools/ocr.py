"""Local OCR: RapidOCR finds and reads the lines, this module puts them into reading order and paragraphs."""

from __future__ import annotations

import math
import queue
import statistics
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from PIL import Image

from opensearch_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rapidocr import RapidOCR

_MIN_SIDE = 32
_DETECTION_SIDE = 128
# RapidOCR shrinks an image to 2000 pixels in length and fails where less than 32 are left of its width.
_MAX_ASPECT = 60
_TITLE_HEIGHT = 1.4
_PARAGRAPH_GAP = 0.9
# Narrower columns, in line heights, are cells of a table: read along the row.
_COLUMN_WIDTH = 6.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of text: upright box in pixels of the image and the recogniser's confidence in [0, 1]."""

    left: float
    top: float
    right: float
    bottom: float
    text: str
    confidence: float = 1.0

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self.bottom - self.top


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines that belong together. ``label`` is ``"title"`` or ``"text"``; ``box`` is (left, top, right, bottom)."""

    label: str
    content: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The blocks of one image in reading order; ``too_small`` counts lines seen but too low to be read."""

    blocks: tuple[Block, ...]
    too_small: int = 0

    @property
    def formatted_text(self) -> str:
        """Contents of the blocks, one a line."""
        return "\n".join(block.content for block in self.blocks)


class LayoutReader:
    """Reads images with RapidOCR (PP-OCR models from its wheel). Safe to share by threads.

    Args:
        min_line_height: lower lines, in pixels of the image, are not read: too many characters come out wrong.
        engines: images read at once; each engine holds its own models, made when first needed, and one thread.
    """

    def __init__(self, *, min_line_height: float = 14.0, engines: int = 1) -> None:
        if engines < 1:
            raise ConfigurationError(f"engines is {engines}: set 1 or more.")
        self._min_line_height = min_line_height
        self._idle: queue.LifoQueue[RapidOCR | None] = queue.LifoQueue()
        for _ in range(engines):
            self._idle.put(None)
        self._making = threading.Lock()

    def read(self, image: Image.Image, *, any_orientation: bool = False) -> Layout:
        """Text of an RGB image; with ``any_orientation`` of the quarter turn of it that reads best."""
        turns = (0, 90, 180, 270) if any_orientation else (0,)
        readings = [self._lines(image.rotate(angle, expand=True) if angle else image) for angle in turns]
        lines = max(readings, key=lambda found: sum(line.confidence * len(line.text) for line in found))
        tall = [line for line in lines if line.height >= self._min_line_height]
        return Layout(blocks=tuple(layout_blocks(tall)), too_small=len(lines) - len(tall))

    def _lines(self, image: Image.Image) -> list[Line]:
        pixels = np.asarray(image)[:, :, ::-1]
        least = max(_MIN_SIDE, math.ceil(max(image.size) / _MAX_ASPECT))
        below, right = max(0, least - image.height), max(0, least - image.width)
        if below or right:
            pixels = cv2.copyMakeBorder(pixels, 0, below, 0, right, cv2.BORDER_REPLICATE)
        with self._engine() as engine:
            found = engine(np.ascontiguousarray(pixels))
        if found.boxes is None or found.txts is None:
            return []
        return [_line(box, text, score) for box, text, score in zip(found.boxes, found.txts, found.scores, strict=True)]

    @contextmanager
    def _engine(self) -> Iterator[RapidOCR]:
        engine = self._idle.get()
        try:
            if engine is None:
                with self._making:
                    engine = _make_engine()
            yield engine
        finally:
            self._idle.put(engine)


def _make_engine() -> RapidOCR:
    from rapidocr import RapidOCR

    params = {
        "Global.log_level": "critical",
        "Global.use_cls": False,
        "Det.limit_side_len": _DETECTION_SIDE,
        "Det.limit_type": "min",
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    return RapidOCR(params=params)


def _line(box: Any, text: str, score: float) -> Line:
    corners = np.asarray(box, float).reshape(4, 2)
    (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
    return Line(
        left=float(left), top=float(top), right=float(right), bottom=float(bottom), text=text, confidence=float(score)
    )


def layout_blocks(lines: list[Line]) -> list[Block]:
    """Lines in reading order, joined to paragraphs: columns from left to right, each from top to bottom; what spans the
    columns comes where it stands.
    """
    if not lines:
        return []
    usual = statistics.median(line.height for line in lines)
    blocks: list[list[Line]] = []
    for row in _rows_in_order(lines, usual):
        joined = _join(row, " ")
        if blocks and _continues(blocks[-1][-1], joined, usual):
            blocks[-1].append(joined)
        else:
            blocks.append([joined])
    return [_block(block, usual) for block in blocks]


def _rows_in_order(lines: list[Line], usual: float) -> list[list[Line]]:
    """Rows of lines, by recursive cuts (XY-cut): first between columns, else below the topmost row."""
    if not lines:
        return []
    column = _column_cut(lines, usual)
    if column is not None:
        left = [line for line in lines if line.right <= column]
        right = [line for line in lines if line.left >= column]
        return _rows_in_order(left, usual) + _rows_in_order(right, usual)
    highest = min(lines, key=lambda line: (line.top, line.left))
    row = [line for line in lines if _same_row(highest, line)]
    rest = [line for line in lines if not _same_row(highest, line)]
    return [sorted(row, key=lambda line: line.left), *_rows_in_order(rest, usual)]


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


def _same_row(first: Line, second: Line) -> bool:
    overlap = min(first.bottom, second.bottom) - max(first.top, second.top)
    return overlap > 0.5 * min(first.height, second.height)


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
