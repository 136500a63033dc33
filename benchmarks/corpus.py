"""Writes a made-up corpus of expert trajectories in the shape of Search-VL-SFT-36K.

    python benchmarks/corpus.py runs/corpus                                    # 36,592 rows of some 5,500 tokens
    python benchmarks/corpus.py runs/small --rows 400 --scale 0.1 --pictures 0 # a file for each picture shown

Seven folders as in the released set, each a ShareGPT list (``conversations`` of human, gpt and observation, ``images``,
``system``, ``tools``) beside a folder ``images`` or an ``images.zip``. A row has 1 to 20 tool turns, 6.3 on average,
and 1 to 4 pictures: the question's, and those of picture tools. Texts are cut from one long babble of made-up words,
so a word is about a token. Rows are written one by one, and a row depends on the seed and its place alone.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

SHARES = {
    "fvqa": 0.13,
    "livevqa": 0.16,
    "palace": 0.08,
    "webqa": 0.17,
    "wiki_art": 0.09,
    "wiki_en": 0.22,
    "wiki_zh": 0.15,
}
"""Folders of the released set, and a guess at the fraction of the rows that each holds."""

RELEASED_ROWS = 36_592
MAX_TOOL_TURNS = 20
_SYLLABLES = ["ka", "lo", "mi", "ren", "tas", "u", "vel", "shi", "no", "dra", "pe", "quo", "zan", "fi", "ber", "go"]
_TEXT_TOOLS = ("text_search", "image_search", "layout_parsing")
_PICTURE_TOOLS = ("crop", "sharpen", "super_resolution", "perspective_correct")


@dataclass(frozen=True, kw_only=True)
class Words:
    """Mean words of the parts of a row at scale 1, which make about 5,500 tokens of a small vocabulary."""

    system: int = 420
    tool: int = 60
    question: int = 40
    thought: int = 55
    query: int = 6
    observation: int = 430
    answer: int = 130


class _Babble:
    """Made-up prose, of which every text is a stretch: drawing words one by one would take minutes a corpus."""

    def __init__(self, seed: int, scale: float) -> None:
        source = random.Random(f"{seed} words")
        words = ["".join(source.choices(_SYLLABLES, k=source.choice((1, 2, 2, 3)))) for _ in range(900)]
        prose = source.choices(words, weights=[1 / (rank + 3) for rank in range(len(words))], k=200_000)
        for place in range(11, len(prose), 13):
            prose[place] += "."
        self._prose, self._scale = prose, scale

    def text(self, source: random.Random, words: float) -> str:
        """About so many words, times the scale; their number varies as that of found pages does."""
        length = max(1, round(words * self._scale * source.lognormvariate(-0.125, 0.5)))
        start = source.randrange(len(self._prose) - length)
        return " ".join(self._prose[start : start + length])


def write_corpus(
    out: Path,
    *,
    rows: int = RELEASED_ROWS,
    scale: float = 1.0,
    pictures: int = 1024,
    zipped: bool = False,
    seed: int = 0,
) -> Path:
    """Write the corpus.

    Args:
        out: folder to make.
        rows: trajectories, all folders together; at least one a folder.
        scale: factor of the words of every text.
        pictures: picture files of all folders together, shown again and again; 0 for one file a place.
        zipped: pictures in ``images.zip`` rather than in a folder.
        seed: of all that is drawn.

    Returns:
        ``out``.
    """
    babble = _Babble(seed, scale)
    ends = [round(rows * sum(list(SHARES.values())[: number + 1])) for number in range(len(SHARES))]
    for name, start, end in zip(SHARES, [0, *ends], ends, strict=False):
        folder = out / name
        folder.mkdir(parents=True)
        with _Pictures(
            folder, share=max(4, pictures * (end - start) // rows) if pictures else 0, zipped=zipped
        ) as album:
            system, tools = _prompt(random.Random(f"{seed} {name}"), babble)
            with (folder / f"{name}_llama_factory_clean.json").open("w", encoding="utf-8") as file:
                for place in range(end - start):
                    source = random.Random(f"{seed} {name} {place}")
                    row = {**_row(source, babble, album), "system": system, "tools": tools}
                    file.write(("[\n" if place == 0 else ",\n") + json.dumps(row, ensure_ascii=False))
                file.write("\n]\n")
    return out


def _prompt(source: random.Random, babble: _Babble) -> tuple[str, str]:
    """System prompt and tools of a folder."""
    words = Words()
    schemas = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": babble.text(source, words.tool),
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
            },
        }
        for name in (*_TEXT_TOOLS, *_PICTURE_TOOLS)
    ]
    return babble.text(source, words.system), json.dumps(schemas)


def _row(source: random.Random, babble: _Babble, album: _Pictures) -> dict[str, Any]:
    words = Words()
    turns = min(MAX_TOOL_TURNS, 1 + int(source.gammavariate(2.2, 2.65)))
    # the question shows a picture, and up to three calls do
    showing = set(source.sample(range(turns), min(turns, source.choice((0, 1, 1, 2, 3)))))
    images = [album.picture(source)]
    conversations = [("human", f"<image>{babble.text(source, words.question)}")]
    for turn in range(turns):
        shows = turn in showing
        name = source.choice(_PICTURE_TOOLS if shows else _TEXT_TOOLS)
        arguments = {"image": f"img_{len(images)}"} if shows else {"q": babble.text(source, words.query)}
        call = json.dumps({"name": name, "arguments": arguments})
        thought = f"<think>{babble.text(source, words.thought)}</think>"
        conversations.append(("gpt", f"{thought}<tool_call>{call}</tool_call>"))
        if shows:
            images.append(album.picture(source))
            conversations.append(("observation", f"img_{len(images)}: <image>"))
        else:
            conversations.append(("observation", babble.text(source, words.observation)))
    thought = f"<think>{babble.text(source, words.thought)}</think>"
    conversations.append(("gpt", f"{thought}<response>{babble.text(source, words.answer)}</response>"))
    return {
        "conversations": [{"from": speaker, "value": value} for speaker, value in conversations],
        "images": images,
    }


class _Pictures:
    """The picture files of a folder: ``share`` of them, drawn when first shown, or a new one at each place."""

    def __init__(self, folder: Path, *, share: int, zipped: bool) -> None:
        self._folder, self._share = folder, share
        self._zip = zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_STORED) if zipped else None
        self._names: dict[int, str] = {}

    def __enter__(self) -> _Pictures:
        return self

    def __exit__(self, *_raised: object) -> None:
        if self._zip is not None:
            self._zip.close()

    def picture(self, source: random.Random) -> str:
        """Path of a picture, as a row names it."""
        number = source.randrange(self._share) if self._share else len(self._names)
        if number not in self._names:
            name, encoded = draw_picture(random.Random(f"{self._folder.name} {number}"))
            self._names[number] = f"images/{number:06}.{name}"
            self._write(self._names[number], encoded)
        return self._names[number]

    def _write(self, name: str, encoded: bytes) -> None:
        if self._zip is not None:
            self._zip.writestr(zipfile.ZipInfo(name), encoded)
            return
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)


def draw_picture(source: random.Random) -> tuple[str, bytes]:
    """A smooth picture of 96 to 640 pixels a side: ending, and file. Two of three are JPEG, the others small PNG."""
    jpeg = source.random() < 2 / 3
    most = 640 if jpeg else 192
    width, height = source.randint(96, most), source.randint(96, most)
    coarse = Image.frombytes("RGB", (6, 5), source.randbytes(90))
    picture = coarse.resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    if jpeg:
        picture.save(file, "JPEG", quality=80)
    else:
        picture.quantize(32, method=Image.Quantize.FASTOCTREE).save(file, "PNG")
    return ("jpg" if jpeg else "png"), file.getvalue()


def source_files(corpus: Path) -> list[Path]:
    """The ShareGPT files of a corpus, in the order of their folders."""
    return [corpus / name / f"{name}_llama_factory_clean.json" for name in SHARES]


def texts(corpus: Path, *, rows: int = 40) -> Iterator[str]:
    """Texts of the first rows of each file, for a tokenizer to learn from. Reads a small corpus whole."""
    for path in source_files(corpus):
        for row in json.loads(path.read_text(encoding="utf-8"))[:rows]:
            yield from (row["system"], row["tools"], *(turn["value"] for turn in row["conversations"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=RELEASED_ROWS)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the words of every text")
    parser.add_argument("--pictures", type=int, default=1024, help="picture files; 0 for one at each place")
    parser.add_argument("--zip", action="store_true", help="pictures in images.zip")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_corpus(
        options.out,
        rows=options.rows,
        scale=options.scale,
        pictures=options.pictures,
        zipped=options.zip,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
