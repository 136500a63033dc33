"""Counted lengths are those of the rendered rows, whatever the images look like."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.chat.images import ImageEncoder
from opensearch_lightning.data import ShardKind, ShardReader, write_sft_shards
from opensearch_lightning.data.lengths import lengths_file, measure
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import DataError, RenderError
from opensearch_lightning.pictures import picture_size, read_picture
from tests.data.rows import answer, call, conversation, picture, row, sft_shards
from tests.models.tiny import tiny_processor

NOISE = np.random.default_rng(0).integers(0, 256, (400, 400, 4), dtype=np.uint8)


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    tile = np.tile(NOISE, (height // 400 + 1, width // 400 + 1, 1))[:height, :width]
    Image.fromarray(tile, "RGBA").convert(mode).save(buffer, format=kind, **options)
    return buffer.getvalue()


def rotated(kind: str, orientation: int, *, width: int = 150, height: int = 40) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(width, height, kind, exif=exif)


SHAPES = [(1, 1), (31, 33), (33, 31), (127, 129), (640, 479), (1999, 13), (13, 1999), (199, 1), (3001, 1007)]
FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_tokens_of_an_image_follow_from_its_size(width: int, height: int) -> None:
    encoder = ImageEncoder(tiny_processor().image_processor)
    for image in (encoded(width, height), encoded(width, height, "JPEG")):
        assert np.prod(encoder.place(image, "x").grid_thw) == np.prod(encoder.encode(image, "x").grid_thw)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_cameras_rotation_counts(orientation: int) -> None:
    sizes = {kind: picture_size(rotated(kind, orientation)) for kind in ("PNG", "JPEG", "WEBP", "TIFF")}
    assert set(sizes.values()) == {(150, 40) if orientation < 5 else (40, 150)}
    assert all(size == read_picture(rotated(kind, orientation)).size for kind, size in sizes.items())


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_are_those_of_the_pictures(kind: str) -> None:
    modes = {"PNG": ("RGBA", "LA", "P", "1"), "JPEG": ("CMYK", "L"), "WEBP": ("RGBA",), "TIFF": ("RGBA", "L")}
    for mode in modes.get(kind, ("RGB",)):
        assert picture_size(encoded(77, 41, kind, mode)) == (77, 41)


def test_heads_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [encoded(77, 41), encoded(77, 41, "JPEG"), rotated("JPEG", 6), encoded(77, 41, "WEBP")]
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert [picture_size(file) for file in files] == [(77, 41), (77, 41), (40, 150), (77, 41)]


def test_a_rotation_behind_the_pixels_of_a_png_counts() -> None:
    whole = rotated("PNG", 6)
    start = whole.index(b"eXIf") - 4
    length = int.from_bytes(whole[start : start + 4], "big") + 12
    chunk, rest = whole[start : start + length], whole[:start] + whole[start + length :]
    end = rest.index(b"IEND") - 4
    late = rest[:end] + chunk + rest[end:]
    assert picture_size(late) == read_picture(late).size == (40, 150)


def test_unusable_images_are_refused_alike() -> None:
    encoder = ImageEncoder(tiny_processor().image_processor)
    for image, message in [(b"no image", "img_1 cannot be read"), (encoded(1, 201), "img_1, 1x201 pixels")]:
        for read in (encoder.encode, encoder.place):
            with pytest.raises(RenderError, match=message):
                read(image, "img_1")
    with pytest.raises(DataError, match="empty"):
        picture_size(b"")


def test_lengths_are_those_of_the_samples(tmp_path: Path) -> None:
    crop = {"type": "function", "function": {"name": "crop", "description": "裁剪图片 ✂️"}}
    turns = conversation(
        ("human", "<image>这座城市在哪里？🗺️ <|im_end|><image>"),
        ("gpt", call("威尼斯 🛶")),
        ("observation", "img_3: <image>"),
        ("observation", "второй"),
        ("gpt", answer("意大利 🇮🇹")),
    )
    images = [rotated("JPEG", 6), encoded(333, 77, mode="RGBA"), encoded(37, 1500, "WEBP")]
    mixed = {"conversations": turns, "images": images, "tools": [crop]}
    write_sft_shards([mixed, {**mixed, "system": "答 <think>"}, {**mixed, "tools": []}, row(3)], tmp_path / "s")
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    for render_tools in (True, False):
        source = SampleSource(reader, tiny_processor(), render_tools=render_tools)
        assert measure(source).tolist() == [len(source.sample(i).token_ids) for i in range(4)]


def test_renderers_of_other_tools_are_whole() -> None:
    tools = [{"type": "function", "function": {"name": "crop"}}]
    turns = [*_turns("Which town?")]
    alone = ChatRenderer(tiny_processor(), tools_in_system=tools).conversation(None, turns)
    shared = ChatRenderer(tiny_processor()).with_tools(tools)
    assert shared.conversation(None, turns).token_ids.tolist() == alone.token_ids.tolist()
    assert shared.length(None, turns) == len(alone.token_ids)


def _turns(text: str) -> list[Any]:
    from opensearch_lightning.chat import AssistantTurn, UserTurn

    return [UserTurn(parts=[text, picture(1)]), AssistantTurn(text=answer("x"))]


@pytest.mark.parametrize("kept", ["", "[1", "{}", '["a", "b", "c"]', "[1, 2]", "[1, 2, 3.5]", "[true, 1, 2]"])
def test_damaged_lengths_are_not_taken(tmp_path: Path, kept: str) -> None:
    source = SampleSource(ShardReader(sft_shards(tmp_path / "s", 3), kind=ShardKind.SFT), tiny_processor())
    path = lengths_file(tmp_path, source)
    path.write_text(kept)
    with pytest.raises(DataError, match=rf"{path.name} .*; remove it"):
        measure(source, folder=tmp_path)
    path.unlink()
    assert measure(source, folder=tmp_path).tolist() == measure(source, folder=tmp_path).tolist()
