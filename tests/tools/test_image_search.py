import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image, ImageFilter

from opensearch_lightning.errors import DataError
from opensearch_lightning.tools import ImageIndex
from opensearch_lightning.tools.local import search_image
from opensearch_lightning.tools.picture_match import LOOK_SIDE, agreement, overlaid
from tests.tools.fakes import book
from tests.tools.pictures import COLOURS, askew, emblem, sign

COUNT = 40


@pytest.fixture(scope="module")
def emblems():
    return [emblem(seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def path(emblems, tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "images"
    ImageIndex.build(path, [(f"id{i}", f"Town {i}", f"wiki/{i}", image) for i, image in enumerate(emblems)])
    return path


@pytest.fixture(scope="module")
def index(path):
    return ImageIndex.open(path)


def found(index, image):
    hits = index.search(image, 1)
    return int(hits[0].id[2:]) if hits else None


def tally(index, emblems, change, every=4):
    """(right, wrong) over some of the emblems."""
    results = [(found(index, change(emblems[i])), i) for i in range(0, COUNT, every)]
    right = sum(got == i for got, i in results)
    return right / len(results), [pair for pair in results if pair[0] not in (None, pair[1])]


def test_clean_pictures_find_themselves(index, emblems):
    assert [found(index, image) for image in emblems] == list(range(COUNT))
    hit = index.search(emblems[3])[0]
    assert (hit.id, hit.title, hit.url) == ("id3", "Town 3", "wiki/3")
    assert hit.score > 0.97


@pytest.mark.parametrize(
    ("change", "at_least"),
    [
        (lambda image: image.resize((256, 256)), 1.0),
        (lambda image: image.filter(ImageFilter.GaussianBlur(2)), 1.0),
        (lambda image: image.resize((32, 32)), 1.0),
        (lambda image: image.point(lambda value: value // 2), 1.0),
        (lambda image: image.crop((10, 10, 86, 80)), 0.6),
        (lambda image: askew(image, 0.2, margin=12), 0.5),
        (lambda image: image.rotate(20, expand=True, fillcolor=(128, 128, 128)), 0.2),
    ],
    ids=["enlarged", "blurred", "shrunk", "darkened", "cropped", "askew", "turned"],
)
def test_spoilt_pictures_find_themselves_or_nothing(index, emblems, change, at_least):
    right, wrong = tally(index, emblems, change)
    assert wrong == []
    assert right >= at_least


def test_features_find_what_a_hash_cannot(emblems, path):
    blind = ImageIndex.open(path, min_inliers=10_000)
    assert found(blind, askew(emblems[0], 0.2, margin=12)) is None
    sighted, _ = tally(ImageIndex.open(path), emblems, lambda image: askew(image, 0.2, margin=12))
    assert sighted >= 0.5


@pytest.mark.parametrize(
    "picture",
    [
        lambda i: emblem(1000 + i),
        lambda i: sign(f"Port of Town {i}"),
        lambda i: Image.new("RGB", (96, 96), COLOURS[i]),
        lambda i: Image.fromarray(np.random.default_rng(i).integers(0, 255, (96, 96, 3), np.uint8)),
    ],
    ids=["other emblems", "signs", "flat", "noise"],
)
def test_strangers_find_nothing(index, picture):
    assert [found(index, picture(i)) for i in range(8)] == [None] * 8


def test_small_part_of_a_scene_is_found_only_after_cropping(index, emblems):
    scene = Image.fromarray(np.random.default_rng(0).integers(90, 160, (200, 200, 3), np.uint8))
    scene.paste(emblems[5].resize((70, 70)), (100, 60))
    assert found(index, scene) is None
    assert found(index, scene.crop((100, 60, 170, 130))) == 5


def test_odd_shapes(index):
    for size in [(1, 1), (300, 2), (2, 300), (3000, 8)]:
        assert index.search(Image.new("RGB", size, "red")) == []
    assert index.search(Image.new("L", (50, 50), 100)) == []


def test_doubles_come_together(tmp_path, emblems):
    entries = [("a", "A", "a", emblems[0]), ("b", "B", "b", emblems[0].copy()), ("c", "C", "c", emblems[1])]
    index = ImageIndex.build(tmp_path / "images", entries)
    assert [hit.id for hit in index.search(emblems[0])] == ["a", "b"]
    assert [hit.id for hit in index.search(emblems[0], top_k=1)] == ["a"]


def test_colour_matters(tmp_path):
    def half(colour):
        image = Image.new("RGB", (64, 64), colour)
        image.paste("white", (0, 0, 64, 32))
        return image

    index = ImageIndex.build(
        tmp_path / "images", [("red", "Red", "r", half("red")), ("blue", "Blue", "b", half("blue"))]
    )
    assert [hit.id for hit in index.search(half("blue"))] == ["blue"]
    assert index.search(half("green")) == []


def test_agreement_ignores_brightness_and_punishes_colour():
    pixels = np.asarray(emblem(1))
    assert agreement(pixels, pixels) == pytest.approx(1, abs=1e-4)
    assert agreement(pixels, pixels // 2) > 0.99
    assert agreement(pixels, pixels[:, :, ::-1]) < 0.8
    pattern = np.random.default_rng(0).integers(0, 100, (16, 16, 1))
    red, blue = (np.uint8(pattern + np.array(tint)) for tint in ([150, 0, 0], [0, 0, 150]))
    assert agreement(red, red) > 0.99
    assert agreement(red, blue) == 0


def test_mirrored_and_folded_warps_do_not_count():
    look = np.asarray(emblem(1, LOOK_SIDE))
    size = (LOOK_SIDE, LOOK_SIDE)
    assert overlaid(look, size, look, size, np.eye(3)) == pytest.approx((1, 1), abs=0.05)
    mirror = np.array([[-1.0, 0, LOOK_SIDE - 1], [0, 1, 0], [0, 0, 1]])
    assert overlaid(look, size, look[:, ::-1], size, mirror) == (0, 0)
    folded = np.array([[1.0, 0, 0], [0, 1, 0], [-0.04, 0, 1]])
    assert overlaid(look, size, look, size, folded) == (0, 0)


def test_between_two_like_pictures_nothing_is_certain(tmp_path, emblems):
    other = emblems[0].copy()
    other.paste("pink", (20, 20, 45, 45))
    index = ImageIndex.build(tmp_path / "images", [("a", "A", "a", emblems[0]), ("b", "B", "b", other)])
    assert [hit.id for hit in index.search(emblems[0])] == ["a"]
    assert [hit.id for hit in index.search(other)] == ["b"]
    assert index.search(Image.blend(emblems[0], other, 0.5)) == []


def test_empty_index_and_bad_paths(tmp_path, path):
    empty = ImageIndex.build(tmp_path / "empty", [])
    assert len(empty) == 0
    assert empty.search(emblem(1)) == []
    with pytest.raises(DataError, match="already exists"):
        ImageIndex.build(path, [])
    with pytest.raises(DataError, match=r"build one with ImageIndex\.build"):
        ImageIndex.open(tmp_path / "nowhere")


def test_tool_text(index, emblems):
    output = search_image(index, {"url": "img_1", "top_k": 5}, book(emblems[7]))
    assert (output.text, output.hits) == ("1. Town 7 (wiki/7)", 1)
    nothing = search_image(index, {"url": "img_1", "top_k": 5}, book(sign("Lindal")))
    assert (nothing.text, nothing.hits) == ("No results.", 0)


def test_two_processes_agree(path, index, emblems):
    script = (
        "import sys; from opensearch_lightning.tools import ImageIndex; from tests.tools.pictures import *;"
        f"index = ImageIndex.open({str(path)!r});"
        "print([index.search(askew(emblem(i), 0.2, margin=12)) for i in range(12)])"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert other == str([index.search(askew(image, 0.2, margin=12)) for image in emblems[:12]])


def test_speed(index, emblems):
    def timed(image):
        before = time.perf_counter()
        index.search(image)
        return time.perf_counter() - before

    assert min(timed(image) for image in emblems[:10]) < 0.02
    assert min(timed(askew(image, 0.2, margin=12)) for image in emblems[:10]) < 0.15
