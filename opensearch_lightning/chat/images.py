"""Images as the policy sees them: decoded, preprocessed once, and kept by content."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from opensearch_lightning.errors import DataError, RenderError
from opensearch_lightning.pictures import as_rgb, picture_size, png_bytes, read_picture
from opensearch_lightning.types import ImageInput

ImageSource = Image.Image | bytes
_Prepared = tuple[bytes, Tensor, tuple[int, int, int]]


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

    def place(self, image: ImageSource, name: str) -> ImageInput:
        """One picture without its patches, for counting tokens: from its size alone, by the image processor's rule.

        ``grid_thw`` has the right number of patches in one line; ``pixel_values`` is empty.

        Raises:
            RenderError: as :meth:`encode`, except that broken pixels may pass.
        """
        try:
            width, height = picture_size(image) if isinstance(image, bytes) else as_rgb(image).size
        except (DataError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _unreadable(name, error) from error
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise _refused(name, width, height, error) from error
        encoded = image if isinstance(image, bytes) else b""
        return ImageInput(name=name, encoded=encoded, pixel_values=torch.empty(0), grid_thw=(1, 1, patches))

    def _prepare(self, image: ImageSource, name: str) -> _Prepared:
        try:
            # the pixels that the tools get, so that coordinates and colours mean the same to the policy
            picture = read_picture(image) if isinstance(image, bytes) else as_rgb(image)
        except (DataError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _unreadable(name, error) from error
        try:
            features = self._processor(images=[picture], return_tensors="pt")
        except ValueError as error:
            raise _refused(name, picture.width, picture.height, error) from error
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


def _unreadable(name: str, error: Exception) -> RenderError:
    return RenderError(f"{name} cannot be read as an image ({error}): give a PNG, JPEG or WebP file")


def _refused(name: str, width: int, height: int, error: Exception) -> RenderError:
    return RenderError(f"{name}, {width}x{height} pixels, cannot be used: {error}")


def _content_key(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return hashlib.blake2b(image, person=b"file").digest()
    # A palette or transparency entry changes what the same bytes of pixels look like.
    head = repr((image.mode, image.size, image.getpalette(), image.info.get("transparency")))
    return hashlib.blake2b(head.encode() + image.tobytes(), person=b"pixels").digest()


def _size(prepared: _Prepared) -> int:
    encoded, pixel_values, _ = prepared
    return len(encoded) + pixel_values.nbytes
