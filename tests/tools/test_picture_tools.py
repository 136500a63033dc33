import cv2
import numpy as np
import pytest
from PIL import Image

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools import picture_tools
from opensearch_lightning.tools.picture_tools import (
    crop,
    find_quadrilateral,
    order_corners,
    perspective_correct,
    rectify,
    sharpen,
    super_resolution,
)
from opensearch_lightning.types import ErrorKind
from tests.tools.pictures import askew, sign


@pytest.fixture
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 100, 3), np.uint8))


def test_crop_cuts_exactly_the_box(picture):
    output = crop(picture, 10, 20, 30, 40)
    assert output.note is None
    assert np.array_equal(np.asarray(output.image), np.asarray(picture)[20:60, 10:40])


@pytest.mark.parametrize(
    ("box", "size", "corner"),
    [
        ((90, 70, 50, 50), (10, 10), (90, 70)),
        ((-10, -10, 50, 50), (40, 40), (0, 0)),
        ((-5, -5, 500, 500), (100, 80), (0, 0)),
        ((10.4, 20.4, 30.2, 40.2), (31, 41), (10, 20)),
        ((10.6, 20.6, 1, 1), (2, 2), (10, 20)),
        ((0.1, 0.2, 99.9, 79.8), (100, 80), (0, 0)),
        ((30 * 1.1, 10, 30 * 0.1, 5), (3, 5), (33, 10)),
    ],
)
def test_crop_clips_and_says_so(picture, box, size, corner):
    output = crop(picture, *box)
    assert output.image.size == size
    assert output.image.getpixel((0, 0)) == picture.getpixel(corner)
    assert (output.note is not None) == (box[0] in (90, -10, -5))
    if output.note:
        assert "clipped" in output.note
        assert "100x80" in output.note


@pytest.mark.parametrize("box", [(500, 500, 50, 50), (-60, 0, 50, 50), (100, 0, 5, 5), (0, 0, 0.2, 10)])
def test_crop_outside_is_an_error_that_tells_the_size(picture, box):
    with pytest.raises(ToolError, match="100x80") as caught:
        crop(picture, *box)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("box", [(10, 10, 0.4, 0.4), (10.2, 10, 0.9, 30), (10, 10, 30, 0.01)])
def test_crop_of_less_than_a_pixel_says_so(picture, box):
    with pytest.raises(ToolError, match="smaller than a pixel of the image of 100x80"):
        crop(picture, *box)


def test_crop_bears_huge_numbers(picture):
    with pytest.raises(ToolError, match="lies outside the image of 100x80"):
        crop(picture, 1e308, 0, 1e308, 80)  # whose sum is infinite


def test_crop_to_a_line_is_refused():
    with pytest.raises(ToolError, match="only a line"):
        crop(Image.new("RGB", (400, 50)), 0, 0, 400, 1)


@pytest.mark.parametrize(
    ("box", "size", "corner"),
    [
        ((0, 0, 1000, 1000), (100, 80), (0, 0)),
        ((500, 250, 500, 750), (50, 60), (50, 20)),
        ((105, 255, 100, 100), (11, 9), (10, 20)),  # 10.5 to 20.5, 20.4 to 28.4
        ((330, 500, 100, 125), (10, 10), (33, 40)),  # 43 exactly, whatever the floats say
        ((990, 0, 10, 1000 / 80), (1, 1), (99, 0)),
    ],
)
def test_a_relative_box_is_rounded_outward_to_pixels(picture, box, size, corner):
    output = crop(picture, *box, coordinates="relative_1000")
    assert output.image.size == size
    assert output.image.getpixel((0, 0)) == picture.getpixel(corner)
    assert output.note is None


def test_texts_about_a_relative_box_are_relative(picture):
    output = crop(picture, 900, 0, 200, 1000, coordinates="relative_1000")
    assert output.image.size == (10, 80)
    assert output.note == "Box clipped to the image, which spans 0 to 1000 both ways."
    for box, reason in (
        ((1000, 0, 10, 10), "The box 1000,0,10,10 is smaller than a pixel of the image, which spans 0 to 1000"),
        ((1000, 0, 50, 50), "The box 1000,0,50,50 lies outside the image, which spans 0 to 1000 both ways."),
        ((0, 0, 5, 1000), "is smaller than a pixel of the image, which spans 0 to 1000 both ways; take a larger one."),
    ):
        with pytest.raises(ToolError, match=reason) as caught:
            crop(picture, *box, coordinates="relative_1000")
        assert "pixels" not in caught.value.message


SHAPES = [(1, 1), (1, 5000), (5000, 1), (2, 3), (7, 7), (3000, 30), (513, 257)]


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("fill", ["noise", "black", "white"])
def test_no_shape_or_filling_breaks_a_tool(size, fill):
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    if fill != "noise":
        pixels[:] = 255 if fill == "white" else 0
    image = Image.fromarray(pixels)
    for amount in (0, 0.3, 1.5, 10):
        made = sharpen(image, amount).image
        assert (made.size, made.mode) == (size, "RGB")
        if fill != "noise":
            assert made.tobytes() == image.tobytes()
    for scale in (2, 3, 4):
        made = super_resolution(image, scale).image
        assert made.size == (width * scale, height * scale)
        if fill != "noise":
            assert made.getextrema() == image.getextrema()
    flat = perspective_correct(image)
    assert flat.image is image or flat.text
    for box in ((0, 0, width, height), (width - 1, height - 1, 5, 5), (-3, -3, 4, 4)):
        try:
            made = crop(image, *box).image
            assert 1 <= made.width <= width
            assert 1 <= made.height <= height
        except ToolError as error:
            assert "only a line" in error.message  # noqa: PT017


@pytest.mark.parametrize("shape", [(2000, 900), (583, 900), (1500, 1200, 3)])
def test_bands_leave_no_seams(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    whole = pixels.astype(np.float64)
    expected = np.clip(2.5 * whole - 1.5 * cv2.GaussianBlur(whole, (19, 19), 3.0), 0, 255)
    assert np.abs(picture_tools._unsharp(pixels, 1.5, 3.0) - expected).max() <= 0.51


def test_random_boxes_are_cut_or_refused(picture):
    rng = np.random.default_rng(3)
    for box in rng.normal(0, 150, (500, 4)):
        for coordinates in ("pixels", "relative_1000"):
            try:
                image = crop(picture, *map(float, box), coordinates=coordinates).image
            except ToolError as error:
                assert error.kind is ErrorKind.INVALID_ARGUMENT  # noqa: PT017
            else:
                assert 1 <= image.width <= 100
                assert 1 <= image.height <= 80


@pytest.mark.parametrize("seed", range(3))
def test_any_quadrilateral_is_rectified_to_a_picture(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        height, width = rng.integers(20, 400, 2)
        pixels = np.full((height, width, 3), 30, np.uint8)
        corners = (rng.random((4, 2)) * (width, height)).astype(np.int32)
        cv2.fillConvexPoly(pixels, cv2.convexHull(corners), (220, 200, 180))
        output = perspective_correct(Image.fromarray(pixels))
        assert (output.text == "Perspective corrected.") == (output.note is None)
        assert max(output.image.size) <= 2 * (width + height)


def test_sharpen_is_the_unsharp_mask(picture):
    pixels = np.asarray(picture).astype(float)
    blurred = cv2.GaussianBlur(pixels, (0, 0), 3.0)
    expected = np.clip(2.5 * pixels - 1.5 * blurred, 0, 255)
    assert np.abs(np.asarray(sharpen(picture, 1.5).image) - expected).max() <= 1
    assert np.array_equal(np.asarray(sharpen(picture, 0).image), np.asarray(picture))


def test_super_resolution_enlarges_and_names_its_means(picture):
    output = super_resolution(picture, 4)
    assert output.image.size == (400, 320)
    assert "Lanczos" in output.text
    assert output.note is None
    back = output.image.resize(picture.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(back).astype(int) - np.asarray(picture)).mean() < 25


def test_super_resolution_refuses_the_huge():
    with pytest.raises(ToolError, match="3000x2000 pixels is too large for scale 4"):
        super_resolution(Image.new("RGB", (3000, 2000)), 4)


def test_corners_of_a_diamond_are_four_and_not_mirrored():
    diamond = [(0, 50), (50, 0), (100, 50), (50, 100)]
    for shuffled in (diamond, diamond[::-1], [diamond[2], diamond[0], diamond[3], diamond[1]]):
        ordered = order_corners(np.array(shuffled))
        assert len({tuple(corner) for corner in ordered.tolist()}) == 4
        assert ordered.tolist() == [[50, 0], [100, 50], [50, 100], [0, 50]]


def test_corners_start_top_left_and_run_clockwise():
    ordered = order_corners(np.array([[90, 75], [5, 70], [95, 3], [2, 1]]))
    assert ordered.tolist() == [[2, 1], [95, 3], [90, 75], [5, 70]]


@pytest.mark.parametrize("grey", [False, True])
def test_rectified_diamond_keeps_its_sense_of_rotation(grey):
    # Quarters of the diamond, clockwise from its top: 40, 100, 160, 220.
    pixels = np.zeros((101, 101), np.uint8)
    for value, corners in zip(
        (40, 100, 160, 220),
        ([(50, 0), (75, 25), (50, 50), (25, 25)], [(100, 50), (75, 75), (50, 50), (75, 25)],
         [(50, 100), (25, 75), (50, 50), (75, 75)], [(0, 50), (25, 25), (50, 50), (25, 75)]),
        strict=True,
    ):  # fmt: skip
        cv2.fillPoly(pixels, [np.array(corners)], value)
    source = pixels if grey else np.dstack([pixels] * 3)
    upright = rectify(source, np.array([(0, 50), (50, 0), (100, 50), (50, 100)]))
    assert upright.shape[:2] == (71, 71)
    gray = upright if grey else upright[:, :, 0]
    assert [int(gray[y, x]) for y, x in ((15, 15), (15, 55), (55, 55), (55, 15))] == [40, 100, 160, 220]


def test_perspective_is_corrected_and_reads_differently_from_the_fallback():
    board = Image.new("RGB", (192, 96), "navy")
    board.paste("yellow", (10, 10, 60, 40))  # top left only: a mirror image would show
    output = perspective_correct(askew(board, 0.3))
    assert output.note is None
    assert output.text == "Perspective corrected."
    upright = output.image.resize((192, 96))
    assert upright.getpixel((35, 25))[2] < 60  # yellow
    assert upright.getpixel((150, 25))[0] < 60  # navy
    assert upright.getpixel((35, 75))[0] < 60
    corner = np.asarray(output.image)[3:-3, 3:-3]
    assert (np.abs(corner.astype(int) - [150, 160, 150]).sum(axis=2) < 30).mean() < 0.02  # no ground left

    plain = Image.new("RGB", (50, 40), "grey")
    fallback = perspective_correct(plain)
    assert fallback.image is plain
    assert "unchanged" in fallback.note
    assert fallback.text == ""


def test_perspective_that_leaves_a_line_falls_back(monkeypatch):
    image = Image.new("RGB", (400, 100))
    line = np.array([(0, 50), (399, 50), (399, 52), (0, 52)])
    monkeypatch.setattr(picture_tools, "find_quadrilateral", lambda pixels: line)
    output = perspective_correct(image)
    assert output.image is image
    assert "only a line: the image is unchanged" in output.note
    assert output.text == ""


def test_grey_and_round_things():
    grey = np.asarray(askew(sign("Lindal"), 0.2).convert("L"))
    assert find_quadrilateral(grey) is not None
    disc = np.zeros((100, 100), np.uint8)
    cv2.circle(disc, (50, 50), 40, 255, -1)
    assert find_quadrilateral(disc) is None
    small = np.zeros((100, 100), np.uint8)
    small[10:30, 10:30] = 255
    assert find_quadrilateral(small) is None
    assert find_quadrilateral(np.zeros((1, 1), np.uint8)) is None


@pytest.mark.parametrize("size", [(100, 80), (64, 64), (192, 96), (300, 200), (96, 300)])
@pytest.mark.parametrize("seed", range(3))
def test_noise_all_over_the_image_is_no_quadrilateral(size, seed):
    noise = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8)
    assert find_quadrilateral(noise) is None
    image = Image.fromarray(noise)
    assert perspective_correct(image).image is image


def test_a_thing_that_fills_most_of_the_image_is_found():
    pixels = np.zeros((200, 300), np.uint8)
    corners = [(30, 4), (296, 12), (290, 190), (5, 196)]
    cv2.fillPoly(pixels, [np.array(corners)], 255)
    assert np.abs(order_corners(find_quadrilateral(pixels)) - corners).max() <= 4


@pytest.mark.parametrize("seed", range(3))
def test_the_hull_of_a_long_outline_is_that_of_all_its_points(seed):
    points = np.random.default_rng(seed).normal(500, 100, (5000, 1, 2)).astype(np.int32)
    points[:, 0, 1] //= 1 + 6 * (seed == 2)
    expected = cv2.convexHull(points)
    hull = picture_tools._hull(points)
    assert {tuple(corner) for corner in hull[:, 0].tolist()} == {tuple(corner) for corner in expected[:, 0].tolist()}
    assert cv2.contourArea(hull) == cv2.contourArea(expected)


def test_diamond_is_found():
    pixels = np.zeros((140, 140), np.uint8)
    cv2.fillPoly(pixels, [np.array([(20, 70), (70, 20), (120, 70), (70, 120)])], 255)
    corners = order_corners(find_quadrilateral(pixels))
    assert np.abs(corners - [[70, 20], [120, 70], [70, 120], [20, 70]]).max() <= 4


@pytest.mark.parametrize("size", [(8200, 100), (1, 8001)])
def test_an_enlargement_is_no_longer_than_a_picture_may_be(size):
    with pytest.raises(ToolError, match="too large for scale 4"):
        super_resolution(Image.new("RGB", size), 4)
