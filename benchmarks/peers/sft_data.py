"""What both sides of the fine-tuning benchmark train: a made-up corpus, a tiny policy, and our shards of the corpus."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import corpus


@dataclass(frozen=True, kw_only=True)
class SFTSettings:
    """Sizes of a run, the same for either side.

    ``batch`` counts trajectories of an update, ``rows`` those of the corpus. Ours trains an epoch, so that each way of
    laying rows out has the same ones; ``steps`` are the peer's updates behind its first.
    """

    folder: str
    batch: int = 8
    rows: int = 512
    steps: int = 8
    scale: float = 0.3
    max_pixels: int = 262_144
    lr: float = 2e-5
    seed: int = 0

    @property
    def corpus(self) -> Path:
        """Folder of the ShareGPT files."""
        return Path(self.folder) / f"corpus_{self.rows}_{self.scale:g}"

    @property
    def shards(self) -> Path:
        """Folder of our shards of the corpus, with the rows' lengths."""
        return self.corpus / "shards"

    @property
    def policy(self) -> Path:
        """Folder of the checkpoint."""
        return self.corpus / f"policy_{self.max_pixels}"

    @classmethod
    def read(cls, folder: Path) -> SFTSettings:
        """Settings that :meth:`write` wrote."""
        return cls(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))

    def write(self) -> None:
        """Write them for another process."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def make_policy(out: Path, source: Path, *, max_pixels: int) -> None:
    """A tiny checkpoint whose tokenizer learned from ``source``."""
    from opensearch_lightning.models import build_tiny_checkpoint

    build_tiny_checkpoint(out, list(corpus.texts(source)), max_pixels=max_pixels, max_positions=65_536)


def shard_command(source: Path, out: Path, policy: Path, *, workers: int = 1) -> list[str]:
    """The command that makes our shards of a corpus, in the order of its rows, with the rows' lengths.

    Tools stay out of the system turn, where the peer cannot put them.
    """
    folders = [str(path.parent) for path in corpus.source_files(source)]
    options = ["--processor", str(policy), "--no-tools", "--workers", str(workers)]
    return [sys.executable, "-m", "opensearch_lightning.cli", "shard", *folders, str(out), *options]


def digest(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> str:
    """Names rows of token ids and which of them are supervised, whatever their order."""
    named = sorted(repr((list(map(int, ids)), [int(bool(one)) for one in mask])) for ids, mask in rows)
    return hashlib.sha256("".join(named).encode()).hexdigest()[:12]
