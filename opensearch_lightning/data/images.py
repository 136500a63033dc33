"""Encoded image files of a row, from the forms in which a row holds them itself."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.errors import DataError, one_line
from opensearch_lightning.pictures import as_rgb, open_picture, png_bytes, read_picture

# Vision processors refuse images longer than 200 times their width, and rounding their sides brings some nearer to it.
MAX_ASPECT = 100

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_KEYS = ("bytes", "path", "url")
# What an encoded picture of a format that is read begins with.
_HEADS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
_SHORTEST_BASE64 = 64
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")


def load_image(source: Any) -> bytes:
    """The encoded file of an image that ``source`` holds itself, checked to decode.

    Args:
        source: any form of :func:`held_image` but a path or URL.

    Raises:
        UnusableRow: the image is elsewhere or cannot be decoded.
    """
    held = held_image(source)
    if isinstance(held, str):
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {held!r:.200} is a path; give the bytes of its file.")
    return checked_image(held)


def held_image(source: Any) -> bytes | str:
    """The encoded file that a value holds, not decoded yet; or the path or URL that it is.

    Args:
        source: the bytes of a file, also as base64, as a ``data:`` URL, as a list or array of numbers; a PIL image or
            an array of pixels (stored as PNG); a mapping with ``bytes``, ``path`` or ``url`` as Parquet data sets
            hold; a path or URL.

    Raises:
        UnusableRow: it is none of these.
    """
    if isinstance(source, Mapping):
        source = next((source[key] for key in _KEYS if _is_given(source.get(key))), None)
        if isinstance(source, Mapping):
            raise _no_image(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | Path):
        return _decoded(str(source))
    if isinstance(source, Image.Image):
        return _stored(source)
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, list | tuple) and source:
        return _from_numbers(source)
    raise _no_image(source)


def checked_image(encoded: bytes, named: str | None = None) -> bytes:
    """``encoded`` itself, if it is a picture that decodes.

    Raises:
        UnusableRow: it is none.
    """
    try:
        read_picture(encoded)
    except DataError as error:
        name = "an image" if named is None else f"image {named!r:.200}"
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"{name} cannot be decoded: {error}.") from error
    return encoded


def checked_shape(encoded: bytes) -> bytes:
    """``encoded`` itself, if its longer side is at most 100 times the other: vision processors refuse what is longer.

    Raises:
        UnusableRow: it is not.
    """
    width, height = open_picture(encoded).size
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnusableRow(
            DropReason.BROKEN_IMAGE,
            f"an image of {width}x{height} pixels is more than {MAX_ASPECT} times longer than wide; cut or pad it.",
        )
    return encoded


def read_below(root: Path, name: str) -> bytes:
    """Content of a file below a folder.

    Raises:
        UnusableRow: there is none, or ``name`` leads out of the folder.
    """
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise UnusableRow(DropReason.MISSING_IMAGE, f"image {name!r:.200} lies outside of {root}.")
        return path.read_bytes()
    except UnusableRow:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # also: a NUL or half a surrogate pair in it, a loop of links
        reason = one_line(error)[:200]
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {name!r:.200} cannot be read: {reason}.") from error


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, bytes | str) and not value)


def _no_image(source: Any) -> UnusableRow:
    return UnusableRow(DropReason.MISSING_IMAGE, f"an image is a path or bytes, got {type(source).__name__}.")


def _decoded(text: str) -> bytes | str:
    """The bytes that a text spells out, or the text itself where it is a name."""
    marked = _DATA_URL.match(text)
    if marked is not None:
        return _from_base64(text[marked.end() :])
    if text[:5].lower() == "data:":
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"a data URL is not in base64: {text!r:.80}.")
    # A path may be made of the same letters, but does not spell the head of a picture.
    if len(text) >= _SHORTEST_BASE64 and _spells_picture(text) and _BASE64.fullmatch(text):
        return _from_base64(text)
    return text


def _spells_picture(text: str) -> bool:
    try:
        return base64.b64decode(text[:16], altchars=b"-_").startswith(_HEADS)
    except (ValueError, binascii.Error):
        return False


def _from_base64(text: str) -> bytes:
    packed = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"base64 of an image is broken: {error}.") from error


def _from_numbers(numbers: list[Any] | tuple[Any, ...]) -> bytes:
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise _no_image(numbers)
    try:
        return bytes(numbers)
    except ValueError as error:
        raise UnusableRow(DropReason.BROKEN_IMAGE, "a list of numbers is no file: bytes are 0 to 255.") from error


def _from_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype != np.uint8 or array.ndim not in (1, 2, 3):
        raise UnusableRow(
            DropReason.BROKEN_IMAGE, f"an array of {array.dtype} and shape {array.shape} is no image; give uint8."
        )
    if array.ndim == 1:
        return array.tobytes()
    try:
        return _stored(Image.fromarray(array))
    except (TypeError, ValueError) as error:
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"an array of shape {array.shape} is no image.") from error


def _stored(image: Image.Image) -> bytes:
    try:
        return png_bytes(as_rgb(image))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # opened, and not read so far
        raise UnusableRow(DropReason.BROKEN_IMAGE, f"an image cannot be decoded: {error}.") from error
