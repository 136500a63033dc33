"""Sources on disk for the tests of sharding."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opensearch_lightning.data.sharding import ShardJob
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.shards import ShardKind
from opensearch_lightning.data.sources import open_source
from tests.data.rows import answer, call, conversation

CROP = {"type": "function", "function": {"name": "crop", "description": "裁剪 ✂️"}}


def noise(seed: int, side: int = 24, kind: str = "PNG") -> bytes:
    """A picture that does not compress."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + seed % 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format=kind)
    return buffer.getvalue()


def sft_source(folder: Path, n_rows: int = 23, *, side: int = 24) -> Path:
    """A folder with ``train.jsonl`` and its images: rows of varying length in several scripts."""
    (folder / "images").mkdir(parents=True)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(n_rows):
            names = [f"images/{number}_{i}.{'jpg' if number % 3 else 'png'}" for i in range(2)]
            for i, name in enumerate(names):
                kind = "JPEG" if name.endswith("jpg") else "PNG"
                (folder / name).write_bytes(noise(2 * number + i, side, kind))
            turns = conversation(
                ("human", f"<image>第{number}座城市在哪里？🗺️"),
                ("gpt", call(f"город {number}")),
                ("observation", "<image>" + "lies ή " * (1 + number * 5 % 11)),
                ("gpt", answer(f"town {number} 🏙️")),
            )
            row = {"id": f"row-{number}", "conversations": turns, "images": names}
            lines.write(json.dumps({**row, "tools": [CROP] if number % 2 else ""}, ensure_ascii=False) + "\n")
    return folder


def rl_source(folder: Path, tasks: Sequence[dict[str, Any]]) -> Path:
    """A folder with ``tasks.jsonl`` and two images, ``a.png`` and ``b.png``, of which ``c.png`` repeats the first."""
    folder.mkdir(parents=True)
    for name, seed in (("a.png", 1), ("b.png", 2), ("c.png", 1)):
        (folder / name).write_bytes(noise(seed))
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)) + "\n")
    return folder


def job(
    sources: Path | Sequence[Path], out: Path, *, kind: ShardKind = ShardKind.SFT, workers: int = 0, **options: Any
) -> ShardJob:
    """A job whose blocks have four rows, with the options of both settings and job."""
    paths = [sources] if isinstance(sources, Path) else sources
    own = {name: options.pop(name) for name in ("max_dropped", "fresh", "progress") if name in options}
    settings = ShardSettings(kind=kind, **{"rows_per_block": 4, **options})
    return ShardJob(sources=[open_source(path) for path in paths], out=out, settings=settings, workers=workers, **own)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
