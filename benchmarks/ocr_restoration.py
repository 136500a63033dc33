"""OCR before and after the right tool: what sharpening, enlarging, rectifying and cropping give back.

    python benchmarks/ocr_restoration.py --items 24 --seed 0 --out runs/ocr_restoration.json

An item is a picture of a board with made-up words. Each degradation is calibrated for each item: of rising strengths
the first is kept at which OCR gets less than 0.8 of the characters right and at least 0.9 once the right tool was used.
Items without such a strength are counted and left out. Choosing so favours the tool; hence the same strengths are also
tried on a second picture with other words, chosen by nothing: the rows called held-out are those to believe.

Prints a Markdown table of mean character accuracies, each 1 - edit distance / characters, at least 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools.ocr import LayoutReader
from opensearch_lightning.tools.picture_tools import crop, perspective_correct, sharpen, super_resolution
from opensearch_lightning.world.names import stems
from opensearch_lightning.world.pictures import blur, shrink

FAILS, WORKS = 0.8, 0.9
# The defaults of the tools: the agent's call needs no more than the image.
AMOUNT, SCALE = 1.5, 4
BOARD = (340, 110)
WALL = (420, 260)
WORDS = ("bridge", "harbour", "museum", "station", "library", "castle", "garden", "market")

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture, the text on it, and where that is: (x, y, width, height)."""

    image: Image.Image
    text: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Degradation:
    """How pictures are spoilt: ``spoil(board, strength, rng)`` for each of the strengths, and the tool that helps."""

    name: str
    tool: str
    strengths: tuple[float, ...]
    spoil: Callable[[Picture, float, np.random.Generator], Picture]


@dataclass(kw_only=True)
class Scores:
    """Character accuracies of the items that could be calibrated, and why the others could not."""

    strengths: list[float] = field(default_factory=list)
    calibrated: list[Mapping[str, float]] = field(default_factory=list)
    held_out: list[Mapping[str, float]] = field(default_factory=list)
    never_failed: int = 0
    never_restored: int = 0


def draw_board(rng: np.random.Generator, names: Iterator[str]) -> Picture:
    """A white board with two dark lines of text on a muted ground."""
    word = WORDS[int(rng.integers(len(WORDS)))]
    lines = [f"{next(names)} {word}", f"opened by {next(names)} in {rng.integers(1100, 2000)}"]
    ground = tuple(int(shade) for shade in rng.integers(110, 180, 3))
    ink = tuple(int(shade) for shade in rng.integers(0, 70, 3))
    size = int(rng.integers(22, 27))
    image = Image.new("RGB", BOARD, ground)
    pen = ImageDraw.Draw(image)
    pen.rectangle((6, 6, BOARD[0] - 7, BOARD[1] - 7), fill=(250, 250, 245), outline=(30, 30, 30), width=2)
    for number, line in enumerate(lines):
        pen.text((18, 18 + 40 * number), line, font=ImageFont.load_default(size), fill=ink)
    return Picture(image=image, text=" ".join(lines), box=(0, 0, *BOARD))


def blurred(board: Picture, sigma: float, rng: np.random.Generator) -> Picture:
    """Gaussian blur; ``sigma`` in pixels."""
    return Picture(image=blur(board.image, sigma), text=board.text, box=board.box)


def shrunk(board: Picture, factor: float, rng: np.random.Generator) -> Picture:
    """Each side divided by ``factor``."""
    image = shrink(board.image, factor)
    return Picture(image=image, text=board.text, box=(0, 0, *image.size))


def tilted(board: Picture, strength: float, rng: np.random.Generator) -> Picture:
    """The board on a wall, seen from the side: its far edge is shorter than the near one by ``strength`` in (0, 1)."""
    width, height = BOARD
    left, top = (WALL[0] - width) / 2, (WALL[1] - height) / 2
    near, far = height * (1 + strength / 2), height * (1 - strength)
    narrow = width * (1 - strength / 2)
    first, last = (near, far) if rng.random() < 0.5 else (far, near)
    slope = float(rng.uniform(-0.25, 0.25)) * narrow * strength
    middle = top + height / 2
    corners = np.array(
        [
            (left, middle - first / 2),
            (left + narrow, middle - last / 2 + slope),
            (left + narrow, middle + last / 2 + slope),
            (left, middle + first / 2),
        ],
        np.float32,
    )
    flat = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    wall = np.full((WALL[1], WALL[0], 3), 225, np.uint8)
    matrix = cv2.getPerspectiveTransform(flat, corners)
    pixels = np.asarray(board.image)
    cv2.warpPerspective(pixels, matrix, WALL, dst=wall, flags=cv2.INTER_AREA, borderMode=cv2.BORDER_TRANSPARENT)
    (x, y), (right, bottom) = np.floor(corners.min(axis=0)), np.ceil(corners.max(axis=0))
    return Picture(image=Image.fromarray(wall), text=board.text, box=(int(x), int(y), int(right - x), int(bottom - y)))


def far_away(board: Picture, width: float, rng: np.random.Generator) -> Picture:
    """The board, at its own size, in a panorama ``width`` pixels wide that OCR looks at as a whole."""
    size = (int(width), int(width) // 5)
    coarse = rng.integers(120, 170, (6, 30, 3)).astype(np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    x, y = (int(rng.integers(0, whole - part)) for whole, part in zip(size, BOARD, strict=True))
    image.paste(board.image, (x, y))
    return Picture(image=image, text=board.text, box=(x, y, *BOARD))


DEGRADATIONS = (
    Degradation(name="blur", tool="sharpen", strengths=(2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0), spoil=blurred),
    Degradation(
        name="downsampling", tool="super_resolution", strengths=(1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0), spoil=shrunk
    ),
    Degradation(name="perspective", tool="perspective_correct", strengths=(0.4, 0.5, 0.6, 0.7), spoil=tilted),
    Degradation(
        name="small text in a large picture",
        tool="crop",
        strengths=(4000.0, 5000.0, 6000.0),
        spoil=far_away,
    ),
)
TOOLS = tuple(degradation.tool for degradation in DEGRADATIONS)


def use(tool: str, picture: Picture) -> Image.Image:
    """What a tool makes of a picture; the picture itself where it refuses."""
    try:
        match tool:
            case "sharpen":
                output = sharpen(picture.image, AMOUNT)
            case "super_resolution":
                output = super_resolution(picture.image, SCALE)
            case "perspective_correct":
                output = perspective_correct(picture.image)
            case _:
                output = crop(picture.image, *picture.box)
    except ToolError:
        return picture.image
    return output.image or picture.image


def edit_distance(first: str, second: str) -> int:
    """Characters to insert, delete or replace between two texts."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        before, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


class Benchmark:
    """Calibrates and measures items.

    Args:
        seed: of words, looks and degradations.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._reader = LayoutReader()
        self._texts: dict[bytes, str] = {}

    def run(self, degradation: Degradation, items: int) -> Scores:
        """Scores of ``items`` items under one degradation."""
        scores = Scores()
        for item in range(items):
            boards = self._boards(degradation, item)
            strength, ever_failed = self._calibrate(degradation, next(boards), item)
            if strength is None:
                scores.never_restored += ever_failed
                scores.never_failed += not ever_failed
                continue
            scores.strengths.append(strength)
            boards = self._boards(degradation, item)
            scores.calibrated.append(self._measure(degradation, next(boards), strength, item, 0))
            scores.held_out.append(self._measure(degradation, next(boards), strength, item, 1))
        return scores

    def _rng(self, degradation: Degradation, *key: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, DEGRADATIONS.index(degradation), *key])

    def _boards(self, degradation: Degradation, item: int) -> Iterator[Picture]:
        rng = self._rng(degradation, item)
        names = stems(rng, WORDS)
        while True:
            yield draw_board(rng, names)

    def _calibrate(self, degradation: Degradation, board: Picture, item: int) -> tuple[float | None, bool]:
        ever_failed = False
        for strength in degradation.strengths:
            spoilt = degradation.spoil(board, strength, self._rng(degradation, item, 0))
            if self._accuracy(spoilt.image, board.text) >= FAILS:
                continue
            ever_failed = True
            if self._accuracy(use(degradation.tool, spoilt), board.text) >= WORKS:
                return strength, ever_failed
        return None, ever_failed

    def _measure(
        self, degradation: Degradation, board: Picture, strength: float, item: int, number: int
    ) -> dict[str, float]:
        spoilt = degradation.spoil(board, strength, self._rng(degradation, item, number))
        after = {tool: self._accuracy(use(tool, spoilt), board.text) for tool in TOOLS}
        clean = self._accuracy(board.image, board.text)
        return {"clean": clean, "degraded": self._accuracy(spoilt.image, board.text), **after}

    def _accuracy(self, image: Image.Image, text: str) -> float:
        return max(0.0, 1 - edit_distance(self._read(image), text) / len(text))

    def _read(self, image: Image.Image) -> str:
        # Tools that leave a picture as it is, and calibration, ask for the same one again.
        digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
        if digest not in self._texts:
            self._texts[digest] = " ".join(self._reader.read(image).formatted_text.split())
        return self._texts[digest]


def rows(degradation: Degradation, scores: Scores) -> list[dict[str, Any]]:
    """One row for the items that strengths were chosen on, one for those that they were not."""
    total = len(scores.strengths) + scores.never_failed + scores.never_restored
    common = {
        "degradation": degradation.name,
        "right_tool": degradation.tool,
        "items": len(scores.strengths),
        "of": total,
        "never_failed": scores.never_failed,
        "never_restored": scores.never_restored,
        "strengths": sorted(scores.strengths),
    }
    made = []
    for pictures, measured in (("calibrated", scores.calibrated), ("held-out", scores.held_out)):
        names = measured[0] if measured else ()
        means = {name: statistics.mean(accuracies[name] for accuracies in measured) for name in names}
        made.append({**common, "pictures": pictures, "accuracy": means})
    return made


def render(table: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; the right tool's column is in bold."""
    header = ["degradation", "pictures", "items", "strength", "clean", "degraded", *TOOLS]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in table:
        accuracy, strengths = row["accuracy"], row["strengths"]
        cells = [str(row["degradation"]), str(row["pictures"]), f"{row['items']} of {row['of']}"]
        cells.append(f"{strengths[0]:g} to {strengths[-1]:g}" if strengths else "")
        for name in ("clean", "degraded", *TOOLS):
            cell = f"{accuracy[name]:.2f}" if accuracy else ""
            cells.append(f"**{cell}**" if name == row["right_tool"] and cell else cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=24, help="pictures for each degradation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.items < 1:
        parser.error(f"--items is {args.items}: set 1 or more")
    benchmark = Benchmark(args.seed)
    table: list[dict[str, Any]] = []
    started = time.perf_counter()
    for degradation in DEGRADATIONS:
        scores = benchmark.run(degradation, args.items)
        table += rows(degradation, scores)
        print(
            f"{degradation.name}: {len(scores.strengths)} calibrated, {scores.never_failed} that OCR read at every "
            f"strength, {scores.never_restored} that {degradation.tool} never gave back, "
            f"{time.perf_counter() - started:.0f} s so far",
            flush=True,
        )
    print(f"\n{render(table)}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"seed": args.seed, "fails_below": FAILS, "works_from": WORKS, "rows": table}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
