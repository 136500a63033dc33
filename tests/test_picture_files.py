import io

import numpy as np
import pytest
from PIL import Image

from opensearch_lightning.pictures import as_rgb, png_bytes


def test_what_is_transparent_becomes_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert [as_rgb(image).getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    grey = Image.new("LA", (1, 1), (0, 128))
    assert as_rgb(grey).getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)


def test_a_cameras_rotation_is_undone() -> None:
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6
    assert as_rgb(image).size == (2, 4)


def test_pixels_come_back_from_a_png() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8))
    assert Image.open(io.BytesIO(png_bytes(image))).tobytes() == image.tobytes()
