"""Lines of text in an image, found and read by RapidOCR, and the pools that engines wait in."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import cv2
import numpy as np
from PIL import Image

from opensearch_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from rapidocr import RapidOCR

T = TypeVar("T")

_MIN_SIDE = 32
_DETECTION_SIDE = 128
# RapidOCR shrinks an image to 2000 pixels in length and fails where less than 32 are left of its width.
_MAX_ASPECT = 60


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


def same_row(first: Line, second: Line) -> bool:
    """Whether two lines stand side by side: they share more than half of the lower one's height."""
    overlap = min(first.bottom, second.bottom) - max(first.top, second.top)
    return overlap > 0.5 * min(first.height, second.height)


class EnginePool(Generic[T]):
    """Engines that serve one caller at a time, each made when first needed.

    Args:
        make: makes an engine.
        engines: how many.

    Raises:
        ConfigurationError: ``engines`` below 1.
    """

    def __init__(self, make: Callable[[], T], engines: int) -> None:
        if engines < 1:
            raise ConfigurationError(f"engines is {engines}: set 1 or more.")
        self._make = make
        self._idle: queue.LifoQueue[T | None] = queue.LifoQueue()
        for _ in range(engines):
            self._idle.put(None)
        self._making = threading.Lock()

    @contextmanager
    def engine(self) -> Iterator[T]:
        """An engine for the caller alone, once one is idle."""
        engine = self._idle.get()
        try:
            if engine is None:
                with self._making:
                    engine = self._make()
            yield engine
        finally:
            self._idle.put(engine)


class LineReader:
    """Finds and reads the lines of images. Safe to share by threads.

    Args:
        engines: images read at once; each engine holds its own models and one thread.

    Raises:
        ConfigurationError: ``engines`` below 1.
    """

    def __init__(self, engines: int) -> None:
        self._pool = EnginePool(_make_engine, engines)

    def read(self, image: Image.Image) -> list[Line]:
        """Lines of an RGB image, in no order that counts."""
        pixels = np.asarray(image)[:, :, ::-1]
        least = max(_MIN_SIDE, math.ceil(max(image.size) / _MAX_ASPECT))
        below, right = max(0, least - image.height), max(0, least - image.width)
        if below or right:
            pixels = cv2.copyMakeBorder(pixels, 0, below, 0, right, cv2.BORDER_REPLICATE)
        with self._pool.engine() as engine:
            found = engine(np.ascontiguousarray(pixels))
        if found.boxes is None or found.txts is None:
            return []
        return [_line(box, text, score) for box, text, score in zip(found.boxes, found.txts, found.scores, strict=True)]

    def read_turned(self, image: Image.Image, *, any_orientation: bool) -> tuple[list[Line], Image.Image, bool]:
        """Lines of an RGB image, or with ``any_orientation`` of the quarter turn of it that reads best.

        Returns:
            The lines, the image whose pixels their boxes are, and whether it was turned.
        """
        best, upright, turned = self.read(image), image, False
        if any_orientation:
            for angle in (90, 180, 270):
                candidate = image.rotate(angle, expand=True)
                lines = self.read(candidate)
                if _amount(lines) > _amount(best):
                    best, upright, turned = lines, candidate, True
        return best, upright, turned


def _amount(lines: list[Line]) -> float:
    return sum(line.confidence * len(line.text) for line in lines)


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
