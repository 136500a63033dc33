"""Learned super-resolution: an EDSR network run by OpenCV.

EDSR is the network of Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution" (2017). Input and
output are treated as OpenCV's ``dnn_superres`` treats them, so that its models of the zoo serve.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError, one_line
from opensearch_lightning.tools import tensorflow_file
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.text_lines import EnginePool
from opensearch_lightning.types import ErrorKind

logger = logging.getLogger(__name__)

SCALES = (2, 3, 4)
# Mean of the training pictures (DIV2K), blue first as the networks take them.
_MEAN_BGR = np.array([103.1545782, 111.561547, 114.35629928], np.float32)
_PROBES = ((8, 12), (11, 9))

Array = NDArray[Any]


class EDSR:
    """Enlarges pictures with a network from a file.

    The network takes ``[1, 3, h, w]`` floats, blue first, 0 to 255 less the mean of DIV2K, for any ``h`` and ``w``, and
    gives ``[1, 3, scale*h, scale*w]`` of the same kind. Large pictures go through it in tiles, so that memory stays
    bounded. Without the file it is no error: pictures come back unchanged with a note that says so, and a warning is
    logged once, here.

    Args:
        weights: an ONNX file, or a frozen TensorFlow graph (``.pb``) of OpenCV's model zoo, such as ``EDSR_x4.pb``.
        scale: 2, 3 or 4; by default what the network does to a small picture.
        tile: side of a tile in pixels of the input, its surroundings not counted.
        overlap: pixels of surroundings that a tile is seen with. The result equals that of the whole picture at once
            when this is at least the network's reach (67 for EDSR with 32 blocks, as in the zoo).
        max_pixels: most pixels of a result.
        workers: copies of the network, each serving one call at a time.

    Raises:
        ConfigurationError: a file that cannot be read as a network, one that does something else than enlarge by
            ``scale``, or a value out of range.
    """

    def __init__(
        self,
        weights: str | Path,
        *,
        scale: int | None = None,
        tile: int = 256,
        overlap: int = 72,
        max_pixels: int = 16_000_000,
        workers: int = 1,
    ) -> None:
        if scale is not None and scale not in SCALES:
            raise ConfigurationError(f"scale is {scale}: set one of {list(SCALES)}, or None to ask the network.")
        for name, value, least in (
            ("tile", tile, 8), ("overlap", overlap, 0), ("max_pixels", max_pixels, 1), ("workers", workers, 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigurationError(f"{name} is {value}: set {least} or more.")
        self._path = Path(weights)
        self._tile, self._overlap, self._max_pixels = tile, overlap, max_pixels
        self._workers = workers
        self._scale = scale
        # A network of OpenCV holds the state of its run: one thread at a time.
        self._networks: EnginePool[_Network] | None = None
        if not self._path.is_file():
            logger.warning("There is no file %s: super_resolution will return pictures as they are.", self._path)
            return
        networks = [_Network(self._path) for _ in range(workers)]
        found = networks[0].scale()
        if scale is not None and scale != found:
            raise ConfigurationError(f"scale is {scale}, and the network of {self._path} enlarges {found}x: set that.")
        self._scale = found
        self._networks = EnginePool(networks.pop, workers)

    @property
    def scale(self) -> int | None:
        """What the network enlarges by; without weights what was given, or ``None``."""
        return self._scale

    @property
    def workers(self) -> int:
        """Calls at once."""
        return self._workers

    def enlarge(self, image: Image.Image, scale: int) -> ToolOutput:
        """``image`` (RGB) enlarged ``scale`` times.

        Where the network enlarges by another factor, its result is resized and the note says so; without weights the
        image is returned unchanged with a note.

        Raises:
            ToolError: ``invalid_argument`` when the result, or what the network makes on the way, would pass
                ``max_pixels``.
        """
        if self._networks is None or self._scale is None:
            return ToolOutput(image=image, note="The super-resolution model is not there: the image is unchanged.")
        if image.width * image.height * max(scale, self._scale) ** 2 > self._max_pixels:
            message = f"An image of {image.width}x{image.height} pixels is too large for scale {scale}; crop it first."
            raise ToolError(ErrorKind.INVALID_ARGUMENT, message)
        with self._networks.engine() as network:
            pixels = self._tiled(network, np.asarray(image), self._scale)
        note = None
        if scale != self._scale:
            size = (image.width * scale, image.height * scale)
            smaller = scale < self._scale
            pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
            note = f"The model enlarges {self._scale}x; its result was resized to {scale}x."
        return ToolOutput(text=f"Enlarged {scale}x by EDSR.", image=Image.fromarray(pixels), note=note)

    def _tiled(self, network: _Network, pixels: Array, scale: int) -> Array:
        height, width = pixels.shape[:2]
        result = np.empty((height * scale, width * scale, 3), np.uint8)
        for row, above in _windows(height, self._tile, self._overlap):
            for column, left in _windows(width, self._tile, self._overlap):
                seen = network.enlarge(pixels[above, left], scale)
                y, x = (row.start - above.start) * scale, (column.start - left.start) * scale
                high, wide = (row.stop - row.start) * scale, (column.stop - column.start) * scale
                top, start = row.start * scale, column.start * scale
                result[top : top + high, start : start + wide] = seen[y : y + high, x : x + wide]
        return result


def _windows(extent: int, tile: int, overlap: int) -> list[tuple[slice, slice]]:
    """Pieces that make up ``extent``, each with what is seen around it; all seen pieces are equally long."""
    seen = tile + 2 * overlap
    if extent <= seen:
        return [(slice(0, extent), slice(0, extent))]
    windows = []
    for start in range(0, extent, tile):
        first = min(max(start - overlap, 0), extent - seen)
        windows.append((slice(start, min(start + tile, extent)), slice(first, first + seen)))
    return windows


class _Network:
    """One copy of the network. Not for two threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensorflow = path.suffix == ".pb"
        try:
            if self._tensorflow:
                self._net = tensorflow_file.read_network(path.read_bytes())
            else:
                self._net = cv2.dnn.readNetFromONNX(str(path))
        except (cv2.error, ValueError, OSError) as error:
            raise self._unusable(one_line(error)[:200]) from error

    def scale(self) -> int:
        """What the network enlarges by, told by what it makes of small inputs.

        Raises:
            ConfigurationError: it does not enlarge by 2, 3 or 4.
        """
        made = []
        for height, width in _PROBES:
            try:
                made.append(self._run(np.zeros((1, 3, height, width), np.float32)).shape)
            except (cv2.error, ValueError) as error:
                reason = f"it does not run on an input of {width}x{height} pixels: {one_line(error)[:200]}"
                raise self._unusable(reason) from error
        for scale in SCALES:
            if made == [(1, 3, height * scale, width * scale) for height, width in _PROBES]:
                return scale
        sizes = ", ".join(f"of {[1, 3, *probe]} it makes {list(s)}" for probe, s in zip(_PROBES, made, strict=True))
        raise self._unusable(f"it does not enlarge by one of {list(SCALES)}: {sizes}")

    def enlarge(self, pixels: Array, scale: int) -> Array:
        """RGB bytes ``[H, W, 3]`` to RGB bytes ``[scale*H, scale*W, 3]``."""
        height, width = pixels.shape[:2]
        blob = (pixels[:, :, ::-1].astype(np.float32) - _MEAN_BGR).transpose(2, 0, 1)[None]
        made = self._run(np.ascontiguousarray(blob))
        if made.shape != (1, 3, height * scale, width * scale):
            raise RuntimeError(f"The network of {self._path} made {made.shape} of {width}x{height} pixels.")
        values = made[0].transpose(1, 2, 0)[:, :, ::-1] + _MEAN_BGR[::-1]
        # What is no number has no colour, and casting it would give any.
        return np.clip(np.rint(np.nan_to_num(values)), 0, 255).astype(np.uint8)

    def _run(self, blob: Array) -> Array:
        self._net.setInput(blob)
        made = np.asarray(self._net.forward())
        return tensorflow_file.depth_to_space(made) if self._tensorflow else made

    def _unusable(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"The EDSR weights {self._path} cannot be used ({reason}): give an ONNX file with free height and width, "
            "blue first, or a .pb file of OpenCV's model zoo."
        )
