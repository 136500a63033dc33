"""The four tools that make a new image of an old one: crop, sharpen, enlarge, rectify.

Corners and, unless said otherwise, boxes are pixels of the image at hand, origin top left, x to the right, y down. No
text names the image: equal pictures share one result whatever their names.
"""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opensearch_lightning.errors import ToolError
from opensearch_lightning.pictures import MAX_SIDE
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.schemas import Coordinates
from opensearch_lightning.types import ErrorKind

Array = NDArray[Any]

_RELATIVE_SPAN = 1000

_SHARPEN_SIGMA = 3.0
# Where the bell curve is cut off, as OpenCV does for bytes.
_BLUR_REACH_SIGMAS = 3
_BAND_PIXELS = 1 << 19
_UPSCALE_AMOUNT = 0.3
# Vision processors refuse images longer than 200 times their width.
_MAX_ASPECT = 100
_MAX_PIXELS = 16_000_000
_MIN_AREA = 0.1
_MIN_FILL = 0.93
_MIN_SIDE = 8
_LONG_OUTLINE = 2000
_SAME_DISTANCE = 0.1
# As fractions of the image's sides: how near its corners three and the fourth of a frame are.
_AT_CORNER, _NEAR_CORNER = 0.06, 0.2
_NOISE = 1e-6


def crop(
    image: Image.Image, x: float, y: float, width: float, height: float, *, coordinates: Coordinates = "pixels"
) -> ToolOutput:
    """Cut out the pixels that the box ``(x, y, width, height)`` touches; what lies outside is left off, with a note.

    With ``coordinates="relative_1000"`` the box is in thousandths of the image's width and height, and so are the
    texts.

    Raises:
        ToolError: ``invalid_argument`` when the box is smaller than a pixel, nothing of it lies inside the image, or
            hardly a line is left.
    """
    box = f"{x:g},{y:g},{width:g},{height:g}"
    if coordinates == "pixels":
        size, remedy = f"the image of {image.width}x{image.height} pixels", "take whole pixels"
    else:
        size, remedy = f"the image, which spans 0 to {_RELATIVE_SPAN} both ways", "take a larger one"
        x, width = x * image.width / _RELATIVE_SPAN, width * image.width / _RELATIVE_SPAN
        y, height = y * image.height / _RELATIVE_SPAN, height * image.height / _RELATIVE_SPAN
    if width < 1 - _NOISE or height < 1 - _NOISE:
        raise ToolError(ErrorKind.INVALID_ARGUMENT, f"The box {box} is smaller than a pixel of {size}; {remedy}.")
    left, right = _touched(x, width, image.width)
    top, bottom = _touched(y, height, image.height)
    wide, high = right - left, bottom - top
    if wide < 1 or high < 1:
        raise ToolError(ErrorKind.INVALID_ARGUMENT, f"The box {box} lies outside {size}.")
    if _is_line(wide, high):
        raise ToolError(ErrorKind.INVALID_ARGUMENT, f"The box {box} leaves only a line of {size}; take a wider one.")
    clipped = x < 0 or y < 0 or x + width > image.width + _NOISE or y + height > image.height + _NOISE
    return ToolOutput(image=image.crop((left, top, right, bottom)), note=f"Box clipped to {size}." if clipped else None)


def _touched(start: float, extent: float, limit: int) -> tuple[int, int]:
    """First pixel and end of those between 0 and ``limit`` that ``[start, start + extent]`` touches."""
    # Clipped first: the sum of huge numbers is no integer. A sliver is the rounding of floats, and touches nothing.
    first, end = min(max(start, 0.0), float(limit)), min(max(start + extent, 0.0), float(limit))
    return math.floor(first + _NOISE), math.ceil(end - _NOISE)


def sharpen(image: Image.Image, amount: float) -> ToolOutput:
    """Unsharp mask ``(1+amount)·I − amount·(G_sigma * I)``, sigma 3 pixels (Appendix F), rounded to bytes."""
    return ToolOutput(image=Image.fromarray(_unsharp(np.asarray(image), amount, _SHARPEN_SIGMA)))


def super_resolution(image: Image.Image, scale: int) -> ToolOutput:
    """Enlarge ``scale`` times by OpenCV's Lanczos with a mild unsharp mask, and say so: no learned model is in it.

    Raises:
        ToolError: ``invalid_argument`` when the result would pass 16 million pixels, or the longest side of a picture.
    """
    size = (image.width * scale, image.height * scale)
    if size[0] * size[1] > _MAX_PIXELS or max(size) > MAX_SIDE:
        message = f"An image of {image.width}x{image.height} pixels is too large for scale {scale}; crop it first."
        raise ToolError(ErrorKind.INVALID_ARGUMENT, message)
    enlarged = cv2.resize(np.asarray(image), size, interpolation=cv2.INTER_LANCZOS4)
    # The rounding of a blur of bytes does not show at so small an amount.
    blurred = cv2.GaussianBlur(enlarged, (0, 0), scale / 4)
    pixels = cv2.addWeighted(enlarged, 1 + _UPSCALE_AMOUNT, blurred, -_UPSCALE_AMOUNT, 0)
    return ToolOutput(text=f"Enlarged {scale}x by Lanczos and mild sharpening.", image=Image.fromarray(pixels))


def perspective_correct(image: Image.Image) -> ToolOutput:
    """Map the largest quadrilateral of the image to an upright rectangle; without a reliable one, or where hardly a
    line would come of it, return the image unchanged with a note that says so.
    """
    pixels = np.asarray(image)
    corners = find_quadrilateral(pixels)
    if corners is None:
        return ToolOutput(image=image, note="No reliable quadrilateral found: the image is unchanged.")
    upright = Image.fromarray(rectify(pixels, corners))
    if _is_line(*upright.size):
        return ToolOutput(image=image, note="The quadrilateral found is only a line: the image is unchanged.")
    return ToolOutput(text="Perspective corrected.", image=upright)


def _is_line(width: int, height: int) -> bool:
    return max(width, height) > _MAX_ASPECT * min(width, height)


def _unsharp(pixels: Array, amount: float, sigma: float) -> Array:
    reach = math.ceil(_BLUR_REACH_SIGMAS * sigma)
    kernel = cv2.getGaussianKernel(2 * reach + 1, sigma, cv2.CV_32F)
    height, width = pixels.shape[:2]
    sharp = np.empty_like(pixels)
    # In bands, so that what lies between the steps stays in the processor's cache.
    rows = max(_BAND_PIXELS // width, 4 * reach)
    for top in range(0, height, rows):
        end = min(top + rows, height)
        first = max(top - reach, 0)
        seen = pixels[first : end + reach]
        # Bytes in, floats out: as fast as a blur of bytes, whose rounding the amount would multiply.
        blurred = cv2.sepFilter2D(seen, cv2.CV_32F, kernel, kernel)[top - first : end - first]
        cv2.addWeighted(pixels[top:end], 1 + amount, blurred, -amount, 0, dst=sharp[top:end], dtype=cv2.CV_8U)
    return sharp


def order_corners(corners: Array) -> Array:
    """The four corners ``[4, 2]`` clockwise as seen on the screen, from the one nearest the top left.

    By angle around their centre: sums and differences of coordinates, the usual way, name one corner of a diamond
    twice. Clockwise order never mirrors the picture.
    """
    points = np.asarray(corners, np.float32).reshape(4, 2)
    centre = points.mean(axis=0)
    angles = np.arctan2(points[:, 1] - centre[1], points[:, 0] - centre[0])
    clockwise = points[np.argsort(angles, kind="stable")]
    sums = clockwise.sum(axis=1)
    nearest = np.flatnonzero(sums <= sums.min() + _SAME_DISTANCE * np.ptp(sums))
    # A diamond has two about equally near: take the upper one.
    start = min(nearest.tolist(), key=lambda i: (clockwise[i, 1], clockwise[i, 0]))
    return np.roll(clockwise, -start, axis=0)


def rectify(pixels: Array, corners: Array) -> Array:
    """Four-point transform of ``[H, W]`` or ``[H, W, 3]`` pixels.

    The quadrilateral becomes an upright rectangle with the longer of each two opposite sides.
    """
    ordered = order_corners(corners)
    top_left, top_right, bottom_right, bottom_left = ordered
    width = round(float(max(np.linalg.norm(top_right - top_left), np.linalg.norm(bottom_right - bottom_left))))
    height = round(float(max(np.linalg.norm(bottom_left - top_left), np.linalg.norm(bottom_right - top_right))))
    width, height = max(width, 1), max(height, 1)
    target = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], np.float32)
    return cv2.warpPerspective(pixels, cv2.getPerspectiveTransform(ordered, target), (width, height))


def find_quadrilateral(pixels: Array) -> Array | None:
    """Corners ``[4, 2]`` of the largest reliable quadrilateral in ``[H, W]`` or ``[H, W, 3]`` pixels, or ``None``.

    Reliable: convex, at least a tenth of the image, not the image itself, and its outline really has four straight
    sides.
    """
    gray = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    smooth = cv2.GaussianBlur(gray, (5, 5), 0)
    edges = cv2.dilate(cv2.Canny(smooth, 40, 120), np.ones((3, 3), np.uint8))
    best, best_area = None, _MIN_AREA * gray.shape[0] * gray.shape[1]
    for contour in cv2.findContours(edges, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)[0]:
        # Most contours are small, and their box is told faster than their hull.
        _, _, width, height = cv2.boundingRect(contour)
        if width * height <= best_area:
            continue
        hull = _hull(contour)
        if cv2.contourArea(hull) <= best_area:
            continue
        corners = _four_corners(hull)
        if corners is not None and not _is_frame(corners, gray.shape[1], gray.shape[0]):
            best, best_area = corners, cv2.contourArea(hull)
    return best


def _hull(contour: Array) -> Array:
    """Convex hull of ``[N, 1, 2]`` points. Of a long outline only the ends of each row go in, which takes less time."""
    if len(contour) < _LONG_OUTLINE:
        return cv2.convexHull(contour)
    x, y = contour[:, 0, 0], contour[:, 0, 1]
    top = int(y.min())
    first = np.full(int(y.max()) - top + 1, np.iinfo(np.int32).max, np.int32)
    last = np.full_like(first, -1)
    np.minimum.at(first, y - top, x)
    np.maximum.at(last, y - top, x)
    rows = np.flatnonzero(last >= 0)
    ends = [np.stack([side[rows], rows + top], axis=1) for side in (first, last)]
    return cv2.convexHull(np.concatenate(ends).astype(np.int32)[:, None])


def _is_frame(corners: Array, width: int, height: int) -> bool:
    """Whether the corners are about those of the image: of noise or a pattern all over it, not of a thing in it."""
    frame = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]])
    distances = np.sort((np.abs(order_corners(corners) - frame) / (width, height)).max(axis=1))
    # The outline of noise is ragged: where it ends early, one corner is cut off.
    return bool(distances[2] <= _AT_CORNER and distances[3] <= _NEAR_CORNER)


def _four_corners(hull: Array) -> Array | None:
    length = cv2.arcLength(hull, True)
    for tolerance in (0.01, 0.02, 0.03, 0.04, 0.05):
        outline = cv2.approxPolyDP(hull, tolerance * length, True)
        if len(outline) != 4:
            continue
        corners = outline.reshape(4, 2).astype(np.float32)
        sides = np.linalg.norm(corners - np.roll(corners, -1, axis=0), axis=1)
        filled = cv2.contourArea(outline) / max(cv2.contourArea(hull), 1.0)
        return corners if sides.min() >= _MIN_SIDE and filled >= _MIN_FILL else None
    return None
