"""Pictures as all parts see them: policy, tools, caches and shards agree on the pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opensearch_lightning.errors import DataError, one_line

# Formats that Pillow decodes by itself: none of them starts a program or reads another file.
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000
MAX_BYTES = 64 * 2**20

# OpenCV's warps count rows and columns in 16 bits.
MAX_SIDE = 32_000
_MAX_TAG_VALUES = 1_000_000
_TAG_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
# Bytes, text and what is not interpreted: kept as they stand in the file.
_PLAIN_TAG_TYPES = (1, 2, 7)

_ORIENTATION = 0x0112
# Formats whose head says the size and the camera's rotation for good.
_SIZED_BY_HEAD = ("PNG", "JPEG", "WEBP")
# Where a PNG file says how it is rotated. Pillow looks for it behind the pixels too, which it decodes to get there.
_PNG_ORIENTATION_MARKS = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type")
_UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED = (5, 6, 7, 8)


def read_picture(encoded: bytes, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES) -> Image.Image:
    """The picture in an encoded file, upright and RGB as :func:`as_rgb` makes it; of an animation, the first frame.

    The format is told by the content. Sizes are checked before anything is decoded.

    Args:
        encoded: a PNG, JPEG, WebP, GIF, BMP or TIFF file.
        max_pixels: most pixels (width times height) to decode; Pillow's own limit holds as well.
        max_bytes: longest file to read.

    Raises:
        DataError: another format, a file that is empty, broken or cut short, or one too large; the message says which.
    """
    image = open_picture(encoded, max_pixels=max_pixels, max_bytes=max_bytes)
    try:
        image.load()
        picture = as_rgb(image)
    # Decoders raise nearly anything on a file made to break them.
    except Exception as error:
        raise DataError(f"the {image.format} file is broken or cut short ({_reason(error)})") from error
    # A frame may be larger than its header said.
    _check_size(picture.size, max_pixels)
    return picture


def open_picture(encoded: bytes, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES) -> Image.Image:
    """The picture in an encoded file with its size and format known and its pixels not decoded yet.

    Args and errors are those of :func:`read_picture`, except that broken pixels show only when they are decoded.
    """
    if not isinstance(encoded, bytes):
        raise DataError(f"a picture is given as the bytes of its file, not as {type(encoded).__name__}")
    if not encoded:
        raise DataError("the file is empty")
    if len(encoded) > max_bytes:
        raise DataError(f"the file has {len(encoded)} bytes, more than the {max_bytes} allowed: make it smaller")
    _check_tags(encoded)
    try:
        image = Image.open(io.BytesIO(encoded), formats=PICTURE_FORMATS)
    except Image.UnidentifiedImageError as error:
        names = ", ".join(PICTURE_FORMATS)
        raise DataError(f"it is no file of a format that is read ({names}), or its head is broken") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"it has too many pixels ({_reason(error)}): make it smaller") from error
    except Exception as error:
        raise DataError(f"the head of the file is broken ({_reason(error)})") from error
    _check_size(image.size, max_pixels)
    return image


def picture_size(encoded: bytes) -> tuple[int, int]:
    """Width and height that :func:`read_picture` would give, in most files without decoding the pixels.

    Raises:
        DataError: as :func:`open_picture`.
    """
    image = open_picture(encoded)
    if image.format not in _SIZED_BY_HEAD:
        return read_picture(encoded).size
    if image.format == "PNG" and not any(mark in encoded for mark in _PNG_ORIENTATION_MARKS):
        return image.size
    width, height = image.size
    return (height, width) if _orientation(image) in _TURNED else (width, height)


def as_rgb(image: Image.Image) -> Image.Image:
    """A copy of ``image``, upright (a camera's rotation undone) and RGB; what is transparent becomes white.

    16-bit grey is scaled to 8 bits. Modes ``I`` and ``F`` do not say their range: values up to 255 stay, those up to
    65535 count as 16 bits, floats up to 1 as fractions, and anything else is spread from its least to its greatest.
    """
    rgb = _rgb(image)
    undo = _UNDO.get(_orientation(image))
    if undo is not None:
        rgb = rgb.transpose(undo)
    elif rgb is image:
        rgb = image.copy()
    # A copy keeps its file's remarks, and would be turned once more by the next part that meets it.
    rgb.info = {name: value for name, value in rgb.info.items() if name == "icc_profile"}
    return rgb


def png_bytes(image: Image.Image) -> bytes:
    """``image`` as a PNG file: without loss, and written fast rather than small."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _from_wide_grey(image)
    # Pillow makes no RGBA of these in one step.
    if image.mode in ("La", "PA"):
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_wide_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    grey = _eight_bits(values, sixteen=image.mode.startswith("I;16"))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _eight_bits(values: NDArray[Any], *, sixteen: bool) -> NDArray[np.uint8]:
    numbers = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(numbers.min()), float(numbers.max())
    if sixteen:
        numbers *= 255 / 65535
    elif low < 0 or high > 65535:
        numbers = (numbers - low) * (255 / max(high - low, np.finfo(np.float64).tiny))
    elif high > 255:
        numbers *= 255 / 65535
    elif values.dtype.kind == "f" and high <= 1:
        numbers *= 255
    return np.rint(numbers).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    # Cameras write broken EXIF, and the picture is none the worse for it.
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise DataError(f"it is {width}x{height} pixels: there is nothing in it")
    if width * height > max_pixels:
        raise DataError(f"it is {width}x{height} pixels, more than the {max_pixels} allowed: make it smaller")
    if max(width, height) > MAX_SIDE:
        raise DataError(f"it is {width}x{height} pixels, and {MAX_SIDE} is the longest side allowed: cut it")


def _check_tags(encoded: bytes) -> None:
    """Refuse a TIFF file whose tags would become millions of Python numbers, or name the same bytes many times.

    Raises:
        DataError: of the first directory, the one that is read.
    """
    order = {b"II": "little", b"MM": "big"}.get(encoded[:2])
    if order is None:
        return

    def number(start: int, length: int) -> int:
        return int.from_bytes(encoded[start : start + length], order)  # type: ignore[arg-type]

    big = number(2, 2) == 43
    word, entry = (8, 20) if big else (4, 12)
    directory = number(8, 8) if big else number(4, 4)
    first = directory + (8 if big else 2)
    values = plain_bytes = 0
    for start in range(first, min(first + entry * number(directory, first - directory), len(encoded)), entry):
        kind, count = number(start + 2, 2), number(start + 4, word)
        held = min(count * _TAG_BYTES.get(kind, 0), len(encoded))
        if kind in _PLAIN_TAG_TYPES:
            plain_bytes += held
        else:
            values += held // _TAG_BYTES.get(kind, 1)
    if values > _MAX_TAG_VALUES or plain_bytes > len(encoded):
        raise DataError("the tags of the TIFF file claim more than its pixels can need: write it anew")


def _reason(error: BaseException) -> str:
    return one_line(error)[:200] or type(error).__name__
