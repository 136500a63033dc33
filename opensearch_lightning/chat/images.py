"""Images as the policy sees them: decoded, preprocessed once, and kept by content."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from PIL import Image

from opensearch_lightning.errors import DataError, RenderError
from opensearch_lightning.pictures import as_rgb, png_bytes, read_picture
from opensearch_lightning.types import ImageInput

if TYPE_CHECKING:
    from torch import Tensor

ImageSource = Image.Image | bytes
_Prepared = tuple[bytes, "Tensor", tuple[int, int, int]]


class ImageEncoder:
    """Turns pictures into :class:`~opensearch_lightning.types.ImageInput`.

    The rollouts of a group see the same pictures, so what was prepared is kept by content, the least recently used
    leaving first. Safe to use from several threads.

    Args:
        image_processor: a Qwen2-VL image processor of transformers.
        cache_bytes: how much to keep, patches and files counted.
    """

    def __init__(self, image_processor: Any, *, cache_bytes: int = 256 * 2**20) -> None:
        self._processor = image_processor
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[bytes, _Prepared] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def encode(self, image: ImageSource, name: str) -> ImageInput:
        """The patches of one picture.

        Args:
            image: a PIL image, or the bytes of an image file. A PIL image is stored as PNG.
            name: what the conversation calls it, such as ``img_1``.

        Raises:
            RenderError: if the bytes are no readable image, or the processor refuses its shape.
        """
        key = _content_key(image)
        prepared = self._lookup(key)
        if prepared is None:
            prepared = self._prepare(image, name)
            self._store(key, prepared)
        encoded, pixel_values, grid = prepared
        return ImageInput(name=name, encoded=encoded, pixel_values=pixel_values, grid_thw=grid)

    def _prepare(self, image: ImageSource, name: str) -> _Prepared:
        try:
            # the pixels that the tools get, so that coordinates and colours mean the same to the policy
            picture = read_picture(image) if isinstance(image, bytes) else as_rgb(image)
        except (DataError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RenderError(f"{name} cannot be read as an image ({error}): give a PNG, JPEG or WebP file") from error
        try:
            features = self._processor(images=[picture], return_tensors="pt")
        except ValueError as error:
            raise RenderError(f"{name}, {picture.width}x{picture.height} pixels, cannot be used: {error}") from error
        t, h, w = features["image_grid_thw"][0].tolist()
        encoded = image if isinstance(image, bytes) else png_bytes(picture)
        return encoded, features["pixel_values"].float(), (t, h, w)

    def _lookup(self, key: bytes) -> _Prepared | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _store(self, key: bytes, prepared: _Prepared) -> None:
        with self._lock:
            if key in self._cache:
                return
            self._cache[key] = prepared
            self._held_bytes += _size(prepared)
            while self._held_bytes > self._cache_bytes:
                _, dropped = self._cache.popitem(last=False)
                self._held_bytes -= _size(dropped)


def _content_key(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return hashlib.blake2b(image, person=b"file").digest()
    # A palette or transparency entry changes what the same bytes of pixels look like.
    head = repr((image.mode, image.size, image.getpalette(), image.info.get("transparency")))
    return hashlib.blake2b(head.encode() + image.tobytes(), person=b"pixels").digest()


def _size(prepared: _Prepared) -> int:
    encoded, pixel_values, _ = prepared
    return len(encoded) + pixel_values.nbytes
