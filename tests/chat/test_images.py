import io

import pytest
import torch
from PIL import Image

from opensearch_lightning.chat.images import ImageEncoder
from opensearch_lightning.errors import RenderError
from opensearch_lightning.tools import ImageBook
from tests.models.tiny import tiny_processor


class CountingProcessor:
    def __init__(self):
        self.calls = 0

    def __call__(self, **options):
        self.calls += 1
        return tiny_processor().image_processor(**options)


def noise(seed, width=48, height=64):
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def file_of(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


def test_patches_are_the_processors():
    got = ImageEncoder(tiny_processor().image_processor).encode(noise(0), "img_1")
    expected = tiny_processor().image_processor(images=[noise(0)], return_tensors="pt")
    torch.testing.assert_close(got.pixel_values, expected["pixel_values"])
    assert [list(got.grid_thw)] == expected["image_grid_thw"].tolist()
    assert got.pixel_values.dtype == torch.float32


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_file_is_kept_as_it_came(kind):
    data = file_of(noise(1), kind)
    got = ImageEncoder(tiny_processor().image_processor).encode(data, "img_1")
    assert got.encoded == data


def test_a_pil_image_is_stored_without_loss():
    got = ImageEncoder(tiny_processor().image_processor).encode(noise(2), "img_1")
    assert Image.open(io.BytesIO(got.encoded)).tobytes() == noise(2).tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_mode_is_read_as_rgb(mode):
    encoder = ImageEncoder(tiny_processor().image_processor)
    got = encoder.encode(noise(3).convert(mode), "img_1")
    expected = encoder.encode(noise(3).convert(mode).convert("RGB"), "img_1")
    torch.testing.assert_close(got.pixel_values, expected.pixel_values)


@pytest.mark.parametrize("given", [lambda image: image, file_of])
def test_the_policy_sees_the_pixels_that_the_tools_get(given):
    picture = noise(7).convert("RGBA")
    picture.putalpha(noise(8).convert("L"))
    book = ImageBook()
    seen_by_tools = book.get(book.add(given(picture)))
    encoder = ImageEncoder(tiny_processor().image_processor)
    got, expected = encoder.encode(given(picture), "img_1"), encoder.encode(seen_by_tools, "img_1")
    torch.testing.assert_close(got.pixel_values, expected.pixel_values, rtol=0, atol=0)


def test_the_same_picture_is_prepared_once_under_any_name():
    processor = CountingProcessor()
    encoder = ImageEncoder(processor)
    first, again = encoder.encode(noise(4), "img_1"), encoder.encode(noise(4), "img_2")
    assert (first.name, again.name) == ("img_1", "img_2")
    assert first.pixel_values is again.pixel_values
    encoder.encode(file_of(noise(4)), "img_1")
    encoder.encode(file_of(noise(4)), "img_7")
    assert processor.calls == 2


def test_pictures_that_differ_are_not_confused():
    encoder = ImageEncoder(tiny_processor().image_processor)
    wide = Image.frombytes("RGB", (96, 32), noise(5, 32, 96).tobytes())
    assert encoder.encode(noise(5, 32, 96), "a").grid_thw == (1, 6, 2)
    assert encoder.encode(wide, "a").grid_thw == (1, 2, 6)
    paletted = noise(6).convert("P")
    other = paletted.copy()
    other.putpalette(list(reversed(paletted.getpalette() or [])))
    assert not encoder.encode(paletted, "a").pixel_values.equal(encoder.encode(other, "a").pixel_values)


def test_the_least_recently_used_picture_leaves_first():
    processor = CountingProcessor()
    size = len(file_of(noise(0))) + 2 * ImageEncoder(processor).encode(noise(0), "a").pixel_values.nbytes
    encoder = ImageEncoder(processor, cache_bytes=2 * size)
    processor.calls = 0
    for seed in (0, 1, 2, 3):
        encoder.encode(noise(seed), "a")
        encoder.encode(noise(0), "a")
    assert processor.calls == 4
    encoder.encode(noise(1), "a")
    assert processor.calls == 5


def test_a_picture_larger_than_the_cache_is_still_encoded():
    encoder = ImageEncoder(tiny_processor().image_processor, cache_bytes=1)
    assert encoder.encode(noise(0), "a").grid_thw == encoder.encode(noise(0), "a").grid_thw


@pytest.mark.parametrize("data", [b"", b"<html>404</html>", file_of(noise(0))[:200]])
def test_what_is_no_image_is_named(data):
    with pytest.raises(RenderError, match="img_3 cannot be read as an image"):
        ImageEncoder(tiny_processor().image_processor).encode(data, "img_3")


def test_a_shape_that_the_processor_refuses_is_named():
    with pytest.raises(RenderError, match=r"img_1, 1000x2 pixels"):
        ImageEncoder(tiny_processor().image_processor).encode(noise(0, 1000, 2), "img_1")
