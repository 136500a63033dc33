"""Small pictures for the tests of the tools: flat emblems, signs with text, and ways to spoil them."""

import random

import cv2
import numpy as np
from PIL import Image, ImageDraw

COLOURS = ["red", "blue", "green", "yellow", "orange", "purple", "white", "black", "teal", "brown"]


def emblem(seed: int, size: int = 96) -> Image.Image:
    """A field in two colours with four charges on it."""
    rng = random.Random(seed)
    side = size * 4
    image = Image.new("RGB", (side, side), rng.choice(COLOURS))
    draw = ImageDraw.Draw(image)
    field = rng.choice([(0, side // 2, side, side), (side // 2, 0, side, side), (0, 0, side // 2, side // 2)])
    draw.rectangle(field, fill=rng.choice(COLOURS))
    for _ in range(4):
        width = rng.randint(side // 6, side // 3)
        x, y = rng.randint(0, side - width), rng.randint(0, side - width)
        colour = rng.choice(COLOURS)
        box = (x, y, x + width, y + width)
        match rng.choice(["disc", "square", "triangle"]):
            case "disc":
                draw.ellipse(box, fill=colour)
            case "square":
                draw.rectangle(box, fill=colour)
            case _:
                draw.polygon([(x, y + width), (x + width / 2, y), (x + width, y + width)], fill=colour)
    return image.resize((size, size), Image.Resampling.LANCZOS)


def sign(text: str, size: tuple[int, int] = (192, 64), font: int = 22) -> Image.Image:
    """White text on a navy board."""
    image = Image.new("RGB", size, "navy")
    draw = ImageDraw.Draw(image)
    draw.multiline_text((10, 10), text, fill="white", font_size=font, spacing=8)
    return image


def askew(
    image: Image.Image, strength: float, margin: int = 32, background: tuple[int, int, int] = (150, 160, 150)
) -> Image.Image:
    """``image`` on a plain ground, seen at an angle."""
    width, height = image.size
    ground = Image.new("RGB", (width + 2 * margin, height + 2 * margin), background)
    ground.paste(image, (margin, margin))
    left, top, right, bottom = margin, margin, margin + width, margin + height
    dx, dy = strength * 60, strength * 60
    source = np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)
    target = np.array(
        [
            [left + dx, top - margin / 2],
            [right - dx / 2, top + dy],
            [right - dx, bottom + margin / 2],
            [left, bottom + dy],
        ],
        np.float32,
    )
    warp = cv2.getPerspectiveTransform(source, target)
    return Image.fromarray(cv2.warpPerspective(np.asarray(ground), warp, ground.size, borderValue=background))
