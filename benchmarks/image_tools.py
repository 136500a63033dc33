"""Times each image tool against bare OpenCV doing the same on the same pixels.

The tool is called as the executor calls it: arguments and a picture of the rollout in, a picture out. Bare OpenCV gets
the pixels as an array and gives an array. Neither reads or writes a file. Both run in turns in one process, with one
OpenCV thread, as when every core has a call of its own. The contract is a median of at most 1.2 times that of bare
OpenCV plus half a millisecond.

    python benchmarks/image_tools.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.tools import ImageBook, offline_tools

Pixels = NDArray[np.uint8]

FACTOR, SLACK_MS = 1.2, 0.5


class _NoWorld:
    """The searches are not called."""

    text_index: Any = None
    image_index: Any = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tool's arguments, the pictures ``[H, W, 3]`` it gets, and the same operation in OpenCV."""

    tool: str
    arguments: Mapping[str, Any]
    pictures: list[Pixels]
    bare: Callable[[Pixels], Pixels]
    label: str = ""


def photo(seed: int, size: int) -> Pixels:
    """Smooth shapes of several sizes with a little grain."""
    rng = np.random.default_rng(seed)
    picture = np.zeros((size, size, 3), np.float32)
    for sigma in (80, 25, 8, 2):
        layer = cv2.GaussianBlur(rng.standard_normal((size, size, 3)).astype(np.float32), (0, 0), sigma)
        picture += layer / layer.std()
    grain = rng.normal(0, 3, picture.shape)
    return np.clip(128 + 25 * picture + grain, 0, 255).astype(np.uint8)


def document(seed: int, size: int, tilt: float) -> Pixels:
    """A page of text lines on a desk, seen at an angle."""
    rng = np.random.default_rng(seed)
    page = np.full((size, size, 3), 245, np.uint8)
    for y in range(size // 20, size - size // 20, size // 25):
        words = "".join("abcdefghij klmnop "[i] for i in rng.integers(0, 18, 60))
        cv2.putText(page, words, (size // 20, y), cv2.FONT_HERSHEY_SIMPLEX, size / 1400, (30, 30, 40), 1)
    near, far = 0.06 * size, (0.06 + tilt) * size
    corners = np.array([[far, near], [size - near, far], [size - far, size - near], [near, size - far]], np.float32)
    frame = np.array([[0, 0], [size, 0], [size, size], [0, size]], np.float32)
    desk = np.full((size, size, 3), (96, 72, 50), np.uint8)
    matrix = cv2.getPerspectiveTransform(frame, corners)
    return cv2.warpPerspective(page, matrix, (size, size), dst=desk, borderMode=cv2.BORDER_TRANSPARENT)


def bare_crop(pixels: Pixels) -> Pixels:
    """The box of the crop, copied."""
    return pixels[100:900, 50:950].copy()


def bare_unsharp(pixels: Pixels, amount: float, sigma: float) -> Pixels:
    """The usual unsharp mask on bytes."""
    return cv2.addWeighted(pixels, 1 + amount, cv2.GaussianBlur(pixels, (0, 0), sigma), -amount, 0)


def bare_enlarge(pixels: Pixels, scale: int) -> Pixels:
    """Lanczos, then a mild unsharp mask."""
    return bare_unsharp(cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_LANCZOS4), 0.3, scale / 4)


def bare_rectify(pixels: Pixels) -> Pixels:
    """Canny, the largest contour of four corners, and the four-point transform."""
    gray = cv2.GaussianBlur(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (5, 5), 0)
    edges = cv2.dilate(cv2.Canny(gray, 40, 120), np.ones((3, 3), np.uint8))
    contours = cv2.findContours(edges, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)[0]
    for contour in sorted(contours, key=cv2.contourArea, reverse=True)[:5]:
        outline = cv2.approxPolyDP(contour, 0.02 * cv2.arcLength(contour, True), True)
        if len(outline) == 4 and cv2.contourArea(outline) > 0.1 * gray.size:
            return four_points(pixels, outline.reshape(4, 2).astype(np.float32))
    return pixels


def four_points(pixels: Pixels, corners: NDArray[np.float32]) -> Pixels:
    """The quadrilateral as an upright rectangle."""
    sums, differences = corners.sum(axis=1), corners[:, 1] - corners[:, 0]
    order = [sums.argmin(), differences.argmin(), sums.argmax(), differences.argmax()]
    ordered = corners[order]
    sides = np.linalg.norm(ordered - np.roll(ordered, -1, axis=0), axis=1)
    width, height = round(float(max(sides[0], sides[2]))), round(float(max(sides[1], sides[3])))
    target = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], np.float32)
    return cv2.warpPerspective(pixels, cv2.getPerspectiveTransform(ordered, target), (width, height))


def cases() -> list[Case]:
    """The four tools; pictures of one megapixel, and smaller ones to be enlarged."""
    photos = [photo(seed, 1000) for seed in range(3)]
    pages = [document(seed, 1000, tilt) for seed, tilt in enumerate((0.05, 0.1, 0.15))]
    large = [*photos, *pages]
    small = [picture[200:712, 200:712].copy() for picture in large]
    box = {"x": 50, "y": 100, "width": 900, "height": 800}
    return [
        Case(tool="crop", arguments=box, pictures=large, bare=bare_crop),
        Case(tool="sharpen", arguments={"amount": 1.5}, pictures=large, bare=lambda p: bare_unsharp(p, 1.5, 3.0)),
        Case(
            tool="super_resolution",
            label="512x512, 2x",
            arguments={"scale": 2},
            pictures=small,
            bare=lambda p: bare_enlarge(p, 2),
        ),
        Case(
            tool="super_resolution",
            label="1000x1000, 4x",
            arguments={"scale": 4},
            pictures=[large[0], large[-1]],
            bare=lambda p: bare_enlarge(p, 4),
        ),
        Case(tool="perspective_correct", label="pages", arguments={}, pictures=pages, bare=bare_rectify),
        Case(tool="perspective_correct", label="photos", arguments={}, pictures=photos, bare=bare_rectify),
    ]


def measure(case: Case, function: Callable[[Mapping[str, Any], ImageBook], Any], seconds: float) -> tuple[float, float]:
    """Median milliseconds of the tool and of bare OpenCV, run in turns for about ``seconds``."""
    import PIL.Image

    images = ImageBook()
    calls = [
        ({**case.arguments, "image": images.add(PIL.Image.fromarray(picture))}, picture) for picture in case.pictures
    ]
    times: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + seconds
    turn = 0
    while turn < 2 * len(calls) or time.perf_counter() < until:
        arguments, picture = calls[turn % len(calls)]
        # Who goes first finds other caches than who comes second.
        for side in (0, 1) if turn // len(calls) % 2 else (1, 0):
            started = time.perf_counter()
            made = case.bare(picture) if side else function(arguments, images)
            times[side].append(time.perf_counter() - started)
            del made
        turn += 1
    tool, bare = (1000 * statistics.median(part[len(part) // 10 :]) for part in times)
    return tool, bare


def main() -> int:
    """Print a table; 1 where a tool is slower than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=14.0, help="time for each line of the table (default 14)")
    parser.add_argument("--threads", type=int, default=1, help="OpenCV threads (default 1)")
    options = parser.parse_args()
    cv2.setNumThreads(options.threads)
    functions = {tool.name: tool.function for tool in offline_tools(_NoWorld())}
    gc.disable()
    print(f"{'tool':20} {'pictures':16} {'tool ms':>8} {'OpenCV ms':>10} {'limit ms':>9} {'ratio':>6}")
    missed = 0
    for case in cases():
        tool, bare = measure(case, functions[case.tool], options.seconds)
        limit = FACTOR * bare + SLACK_MS
        late = tool > limit
        missed += late
        line = f"{case.tool:20} {case.label or '1000x1000':16} {tool:8.2f} {bare:10.2f} {limit:9.2f} {tool / bare:6.2f}"
        print(line + ("  missed" if late else ""), flush=True)
    print(f"limit: {FACTOR} x OpenCV + {SLACK_MS} ms; {'all within' if not missed else f'{missed} missed'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
