import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from opensearch_lightning.errors import DataError
from opensearch_lightning.pictures import as_rgb, open_picture, png_bytes, read_picture

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 30, 3), np.uint8))


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, bits: int = 8, colour: int = 2, rows: bytes = b"", extra: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def tiff_head(*tags: tuple[int, int, int, int]) -> bytes:
    """A TIFF file of one directory of tags (number, type, count, value or offset), and nothing else."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


def test_what_is_transparent_becomes_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert [as_rgb(image).getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    grey = Image.new("LA", (1, 1), (0, 128))
    assert as_rgb(grey).getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)
    assert as_rgb(grey.convert("La")).getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_becomes_white(kind: str) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    picture = read_picture(file_of(image, kind, transparency=1))
    assert [picture.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_cameras_rotation_is_undone(orientation: int, kind: str) -> None:
    upright = Image.new("L", (48, 32), 0)
    upright.paste(80, (24, 0, 48, 16))
    upright.paste(160, (0, 16, 24, 32))
    upright.paste(240, (24, 16, 48, 32))
    turned = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]  # fmt: skip
    stored = (upright if turned is None else upright.transpose(turned)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = read_picture(file_of(stored, kind, exif=exif))
    assert picture.size == (48, 32)
    values = [picture.getpixel(place)[0] for place in ((12, 8), (36, 8), (12, 24), (36, 24))]
    assert values == pytest.approx([0, 80, 160, 240], abs=4)
    assert as_rgb(picture).tobytes() == picture.tobytes()


def test_a_picture_given_directly_is_turned_and_copied() -> None:
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6
    assert as_rgb(image).size == as_rgb(as_rgb(image)).size == (2, 4)
    plain = Image.new("RGB", (4, 2))
    copy = as_rgb(plain)
    copy.putpixel((0, 0), (9, 9, 9))
    assert plain.getpixel((0, 0)) == (0, 0, 0)


def test_broken_exif_turns_nothing() -> None:
    assert read_picture(file_of(NOISE, "PNG", exif=b"Exif\0\0no TIFF head")).tobytes() == NOISE.tobytes()


def test_pixels_come_back_from_a_png() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8))
    assert read_picture(png_bytes(image)).tobytes() == image.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey_are_scaled(kind: str) -> None:
    values = np.array([[0, 255, 257, 32768, 65535]], np.uint16)
    picture = read_picture(file_of(Image.fromarray(values), kind))
    assert np.asarray(picture)[0, :, 0].tolist() == [0, 1, 1, 128, 255]
    assert as_rgb(Image.fromarray(values)).tobytes() == picture.tobytes()


def test_16_bits_of_colour_are_scaled() -> None:
    rows = b"\0" + np.array([65535, 32768, 300], ">u2").tobytes()
    assert read_picture(png(1, 1, bits=16, rows=rows)).getpixel((0, 0)) == (255, 128, 1)


def test_a_transparent_16_bit_grey_becomes_white() -> None:
    rows = b"\0" + np.array([1000, 2000], ">u2").tobytes()
    encoded = png(2, 1, bits=16, colour=0, rows=rows, extra=chunk(b"tRNS", struct.pack(">H", 2000)))
    assert np.asarray(read_picture(encoded))[0, :, 0].tolist() == [4, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 7, 255]], np.int32), [0, 7, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-100000, 0, 100000]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 7, 255]], np.float32), [0, 7, 255]),
        (np.array([[0, np.nan, np.inf]], np.float32), [0, 0, 0]),
        (np.array([[0, 257, 65535]], np.float32), [0, 1, 255]),
        (np.array([[-1e30, 0, 1e30]], np.float32), [0, 128, 255]),
    ],
)
def test_grey_of_unknown_range(values: np.ndarray, expected: list[int]) -> None:
    for picture in (as_rgb(Image.fromarray(values)), read_picture(file_of(Image.fromarray(values), "TIFF"))):
        assert np.asarray(picture)[0, :, 1].tolist() == expected


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])  # the first holds its inks inverted, as Adobe's programs write them
def test_printing_inks_become_the_colours_they_print(kind: str) -> None:
    cyan_and_black = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    cyan_and_black.paste((0, 0, 0, 255), (8, 0, 16, 16))
    picture = read_picture(file_of(cyan_and_black, kind, quality=95))
    assert picture.getpixel((2, 8)) == pytest.approx((0, 255, 255), abs=8)
    assert picture.getpixel((13, 8)) == pytest.approx((0, 0, 0), abs=8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_png_is_read(mode: str) -> None:
    image = NOISE.convert("L").convert(mode) if mode == "I;16" else NOISE.convert(mode)
    picture = read_picture(file_of(image, "PNG"))
    assert (picture.mode, picture.size) == ("RGB", NOISE.size)


def test_the_content_tells_the_format_and_only_closed_formats_are_read() -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/tmp/x) (w) file\n"
    for encoded in (
        postscript,
        b"%PDF-1.4\n",
        b"<svg xmlns='x'/>",
        b"<html>404</html>",
        b"\0",
    ):
        with pytest.raises(DataError, match="no file of a format that is read"):
            read_picture(encoded)
    for kind in ("PPM", "ICO", "JPEG2000", "PCX"):  # which Pillow reads
        with pytest.raises(DataError, match="no file of a format that is read"):
            read_picture(file_of(NOISE, kind))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        assert read_picture(file_of(NOISE, kind)).size == NOISE.size


def test_what_is_given_must_be_bytes_of_a_file_that_is_not_too_long() -> None:
    with pytest.raises(DataError, match="the file is empty"):
        read_picture(b"")
    with pytest.raises(DataError, match="not as str"):
        read_picture("picture.png")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="more than the 100 allowed"):
        read_picture(png_bytes(NOISE), max_bytes=100)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_files_cut_short_are_refused(kind: str, kept: float) -> None:
    encoded = file_of(NOISE, kind)
    with pytest.raises(DataError, match="broken"):
        read_picture(encoded[: int(kept * len(encoded))])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_flipped_bytes_give_a_picture_or_a_data_error(kind: str) -> None:
    encoded = bytearray(file_of(NOISE, kind, exif=Image.Exif()) if kind in ("JPEG", "WEBP") else file_of(NOISE, kind))
    rng = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(encoded)
        for place in rng.integers(0, min(len(broken), 400), 3):
            broken[place] = rng.integers(256)
        with contextlib.suppress(DataError):
            assert read_picture(bytes(broken)).mode == "RGB"


def test_a_head_that_claims_too_much_is_refused_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    bomb = png(20000, 20000, bits=1, colour=0, rows=bytes(20000 * (1 + 20000 // 8)))
    assert len(bomb) < 100_000
    for encoded, size in (
        (png(60000, 60000), "3600000000 pixels"),
        (bomb, "400000000 pixels"),
        (png(9000, 9000), "9000x9000 pixels, more than the 50000000 allowed"),
        (png(1, 40000), "1x40000 pixels, and 32000 is the longest side"),
    ):
        with pytest.raises(DataError, match=size):
            read_picture(encoded)
    with pytest.raises(DataError, match="30x24 pixels, more than the 700 allowed"):
        read_picture(png_bytes(NOISE), max_pixels=700)
    assert open_picture(png_bytes(NOISE), max_pixels=720).size == (30, 24)


def test_pillows_own_limit_is_left_as_it_is() -> None:
    limit = Image.MAX_IMAGE_PIXELS
    read_picture(png_bytes(NOISE), max_pixels=10**9)
    with pytest.raises(DataError, match="too many pixels"):
        read_picture(png(60000, 60000), max_pixels=10**10)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_text_that_unpacks_without_end_is_refused() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200_000_000), 9))
    assert len(text) < 250_000
    with pytest.raises(DataError, match="broken"):
        read_picture(png(1, 1, rows=bytes(4), extra=text))


def test_an_empty_picture_is_refused() -> None:
    for encoded in (png(0, 5), png(5, 0), b"GIF89a" + struct.pack("<HH", 0, 0) + bytes(3) + b";"):
        with pytest.raises(DataError):
            read_picture(encoded)


def test_tiff_tags_without_end_are_refused() -> None:
    size = [(256, 3, 1, 8), (257, 3, 1, 8)]
    filler = bytes(4_000_000)
    many_numbers = tiff_head(*size, (258, 3, 2_000_000, 100)) + filler
    same_bytes_again = tiff_head(*size, *((60000 + i, 7, 3_900_000, 100) for i in range(200))) + filler
    for encoded in (many_numbers, same_bytes_again):
        with pytest.raises(DataError, match="tags of the TIFF file claim more"):
            read_picture(encoded)


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (200, 100, 50)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        encoded = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert read_picture(encoded).getpixel((0, 0)) == (200, 0, 0)
    # A frame that cannot be decoded follows: nothing looks at it.
    animated = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = file_of(frames[0], "GIF")
    assert read_picture(animated[: len(first) + 20]).size == (4, 4)
