"""Encoded image files of a row, from wherever the row keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.errors import DataError
from opensearch_lightning.pictures import as_rgb, png_bytes, read_picture


def load_image(source: Any, root: Path | None) -> bytes:
    """The encoded file of one image, checked to decode.

    Args:
        source: a path relative to ``root``, the bytes of a file, a PIL image (stored as PNG), or a mapping with
            ``bytes`` or ``path`` as Parquet data sets hold.
        root: folder that paths are read from; a path may not lead out of it.

    Raises:
        UnusableRow: the image is missing or cannot be decoded.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        return _stored(source)
    encoded = _read(source, root) if isinstance(source, str | Path) else source
    if not isinstance(encoded, bytes):
        raise UnusableRow(DropReason.MISSING_IMAGE, f"an image is a path or bytes, got {type(source).__name__}.")
    try:
        read_picture(encoded)
    except DataError as error:
        named = f" {str(source)!r}" if isinstance(source, str | Path) else ""
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"image{named} cannot be decoded: {error}.") from error
    return encoded


def _stored(image: Image.Image) -> bytes:
    try:
        return png_bytes(as_rgb(image))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # opened, and not read so far
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"an image cannot be decoded: {error}.") from error


def _read(name: str | Path, root: Path | None) -> bytes:
    if root is None:
        raise UnusableRow(
            DropReason.MISSING_IMAGE, f"image {str(name)!r} is a path; say which folder holds the images."
        )
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise UnusableRow(DropReason.MISSING_IMAGE, f"image {str(name)!r} lies outside of {root}.")
        return path.read_bytes()
    except UnusableRow:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # also: a NUL or half a surrogate pair in it, a loop of links
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {str(name)!r} cannot be read: {error}.") from error
