"""Pictures of entities, drawn from numbers: emblems, labels, name signs, scenes, and what spoils them.

Sizes are in pixels and small on purpose: a vision model spends one token on each 32 x 32 block.
"""

from __future__ import annotations

from enum import StrEnum
from math import cos, pi, sin

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

EMBLEM_SIDE = 96
SCENE_SIDE = 128
SIGN_SIZE = (160, 64)
_FINE = 4  # pictures are drawn this many times larger, then reduced: smooth edges
_COLOURS = (
    (214, 40, 40), (247, 127, 0), (252, 211, 77), (34, 139, 74), (0, 150, 199), (29, 53, 158),
    (114, 9, 183), (240, 98, 178), (110, 62, 32), (245, 245, 240), (24, 24, 32), (124, 219, 196),
)  # fmt: skip
_MUTED = ((143, 146, 140), (128, 134, 140), (152, 147, 136), (118, 124, 120), (160, 160, 154), (136, 128, 124))

Point = tuple[float, float]
Box = tuple[int, int, int, int]


class PictureKind(StrEnum):
    """How an anchor is shown."""

    EMBLEM = "emblem"
    LABELLED = "labelled"
    SIGN = "sign"
    SCENE = "scene"
    BLURRED = "blurred"
    SMALL = "small"
    SKEWED = "skewed"


def draw_emblem(rng: np.random.Generator) -> Image.Image:
    """An emblem: a mosaic, a striped corner, and two shapes in four strong colours, ``EMBLEM_SIDE`` square.

    The mosaic carries what survives coarse looking, stripes and edges what blur takes away.
    """
    side = EMBLEM_SIDE * _FINE
    colours = [_COLOURS[i] for i in rng.permutation(len(_COLOURS))[:4]]
    canvas = Image.new("RGB", (side, side), colours[0])
    pen = ImageDraw.Draw(canvas)
    cell = side // 4
    for number, filled in enumerate(rng.random(16) < 0.5):
        if filled:
            left, top = number % 4 * cell, number // 4 * cell
            pen.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colours[1])
    _stripe(rng, canvas, colours[2])
    x, y = (float(v) * side for v in rng.uniform(0.38, 0.62, size=2))
    pen.polygon(_shape(rng, x, y, 0.30 * side), fill=colours[3], outline=(20, 20, 20), width=2 * _FINE)
    dx, dy = (float(v) * side for v in rng.uniform(-0.06, 0.06, size=2))
    pen.polygon(_shape(rng, x + dx, y + dy, 0.15 * side), fill=colours[int(rng.integers(3))])
    pen.rectangle((0, 0, side - 1, side - 1), outline=(20, 20, 20), width=2 * _FINE)
    return canvas.resize((EMBLEM_SIDE, EMBLEM_SIDE), Image.Resampling.BOX)


def draw_sign(rng: np.random.Generator, name: str) -> Image.Image:
    """A plain board that says ``name``, ``SIGN_SIZE`` large."""
    width, height = SIGN_SIZE
    sign = Image.new("RGB", SIGN_SIZE, _MUTED[int(rng.integers(len(_MUTED)))])
    pen = ImageDraw.Draw(sign)
    pen.rectangle((4, 6, width - 5, height - 7), fill=(250, 250, 245), outline=(30, 30, 30), width=2)
    size = 26
    while pen.textlength(name, font=ImageFont.load_default(size)) > width - 24:
        size -= 1
    pen.text((width / 2, height / 2), name, font=ImageFont.load_default(size), fill=(10, 10, 50), anchor="mm")
    return sign


def draw_labelled(emblem: Image.Image, name: str) -> Image.Image:
    """The emblem on a white card, ``name`` below it, ``SCENE_SIDE`` square."""
    side = SCENE_SIDE
    card = Image.new("RGB", (side, side), (250, 250, 245))
    card.paste(emblem, ((side - emblem.width) // 2, 0))
    pen = ImageDraw.Draw(card)
    size = 20
    while pen.textlength(name, font=ImageFont.load_default(size)) > side - 8:
        size -= 1
    middle = (side / 2, (side + emblem.height) / 2)
    pen.text(middle, name, font=ImageFont.load_default(size), fill=(10, 10, 50), anchor="mm")
    return card


def draw_scene(rng: np.random.Generator, emblem: Image.Image) -> tuple[Image.Image, Box]:
    """A busy grey scene with the emblem in one of its four quarters, and the emblem's box (x, y, width, height)."""
    scene = _clutter(rng, SCENE_SIDE)
    half = SCENE_SIDE // 2
    quarter = int(rng.integers(4))
    x, y = quarter % 2 * half, quarter // 2 * half
    scene.paste(emblem.resize((half, half), Image.Resampling.LANCZOS), (x, y))
    return scene, (x, y, half, half)


def blur(image: Image.Image, sigma: float) -> Image.Image:
    """Gaussian blur; ``sigma`` in pixels."""
    return Image.fromarray(cv2.GaussianBlur(np.asarray(image), (0, 0), sigma))


def shrink(image: Image.Image, factor: float) -> Image.Image:
    """Fewer pixels: each side divided by ``factor``."""
    size = (max(1, round(image.width / factor)), max(1, round(image.height / factor)))
    return image.resize(size, Image.Resampling.BOX)


def skew(rng: np.random.Generator, image: Image.Image, strength: float) -> Image.Image:
    """The picture as a poster on a wall, seen from the left or the right.

    The far edge is shorter than the near one by ``strength`` in (0, 1). The wall is ``SCENE_SIDE`` square and the
    poster fills a quarter of it.
    """
    near, width = 0.5 / (1 - strength / 2), 0.5
    far = near * (1 - strength)
    left, middle = rng.uniform(0.08, 0.92 - width), rng.uniform(near / 2 + 0.04, 0.96 - near / 2)
    first, last = (near, far) if rng.random() < 0.5 else (far, near)
    corners = [(0.0, -first / 2), (width, -last / 2), (width, last / 2), (0.0, first / 2)]
    target = np.array([(left + x, middle + y) for x, y in corners], np.float32) * SCENE_SIDE
    w, h = image.size
    matrix = cv2.getPerspectiveTransform(np.array([(0, 0), (w, 0), (w, h), (0, h)], np.float32), target)
    wall = np.full((SCENE_SIDE, SCENE_SIDE, 3), 225, np.uint8)
    flags, border = cv2.INTER_AREA, cv2.BORDER_TRANSPARENT
    cv2.warpPerspective(np.asarray(image), matrix, (SCENE_SIDE, SCENE_SIDE), dst=wall, flags=flags, borderMode=border)
    return Image.fromarray(wall)


def _stripe(rng: np.random.Generator, canvas: Image.Image, colour: tuple[int, int, int]) -> None:
    side = canvas.width
    period = int(rng.integers(7, 10)) * _FINE
    slope = int(rng.integers(-1, 2))
    y, x = np.mgrid[0:side, 0:side]
    bands = ((x * (1 if slope else int(rng.integers(2))) + y * (slope or 1)) // (period // 2)) % 2 == 0
    turn = rng.uniform(0, 2 * pi)
    region = (x - side / 2) * cos(turn) + (y - side / 2) * sin(turn) > 0
    mask = Image.fromarray(((bands & region) * 255).astype(np.uint8))
    canvas.paste(colour, (0, 0), mask)


def _shape(rng: np.random.Generator, x: float, y: float, radius: float) -> list[Point]:
    """Corners of a star with 2 to 7 points, from spiky to nearly round."""
    points, depth = int(rng.integers(2, 8)), float(rng.choice([0.35, 0.55, 0.75, 0.95]))
    turn = float(rng.uniform(0, 2 * pi))
    radii = [radius, radius * depth] * points
    return [(x + r * cos(turn + pi * i / points), y + r * sin(turn + pi * i / points)) for i, r in enumerate(radii)]


def _clutter(rng: np.random.Generator, side: int) -> Image.Image:
    scene = Image.new("RGB", (side * _FINE, side * _FINE), _MUTED[int(rng.integers(len(_MUTED)))])
    pen = ImageDraw.Draw(scene)
    for _ in range(40):
        x, y = (float(v) for v in rng.uniform(0, side * _FINE, size=2))
        shape = _shape(rng, x, y, float(rng.uniform(0.05, 0.14)) * side * _FINE)
        pen.polygon(shape, fill=_MUTED[int(rng.integers(len(_MUTED)))], outline=(100, 100, 100))
    return scene.resize((side, side), Image.Resampling.BOX)
