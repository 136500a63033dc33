"""LitData shards of records with images: one layout for SFT rows and RL tasks.

A sample is ``{"record": JSON, "sizes": JSON list of byte counts, "blob": the images joined}``: lists of byte strings
and lists of varying length are what LitData refuses or silently cuts. The blob is a tensor of bytes because LitData
packs samples of plain bytes alone into record batches, and reads hundreds of rows to return one. Beside LitData's
``index.json`` stands ``shards.json`` with the kind of rows, their number and a digest of their contents.
"""

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import DataError

META = "shards.json"
FORMAT = 1
Shards = Path | str | Sequence[Path | str]


class ShardKind(StrEnum):
    """What the rows of a shard folder are."""

    SFT = "sft"
    RL = "rl"


class ShardReader:
    """Random access to the rows of one or more shard folders, joined in the order given.

    Args:
        folders: shard folders.
        kind: what the rows must be.

    Raises:
        DataError: a folder is missing, holds no shards, or shards of another kind.
    """

    def __init__(self, folders: Shards, *, kind: ShardKind) -> None:
        listed = [folders] if isinstance(folders, Path | str) else list(folders)
        if not listed:
            raise DataError("no shard folder given.")
        metas = [_read_meta(Path(folder), kind) for folder in listed]
        self.digest = hashlib.sha256("".join(meta["digest"] for meta in metas).encode()).hexdigest()
        self._ends: list[int] = []
        self._sets = [_open(Path(folder), meta["rows"]) for folder, meta in zip(listed, metas, strict=True)]
        for meta in metas:
            self._ends.append((self._ends[-1] if self._ends else 0) + meta["rows"])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = next(i for i, end in enumerate(self._ends) if index < end)
        sample = self._sets[part][index - (self._ends[part - 1] if part else 0)]
        blob = memoryview(sample["blob"].numpy())
        images, start = [], 0
        for size in json.loads(bytes(sample["sizes"])):
            images.append(bytes(blob[start : start + size]))
            start += size
        return json.loads(bytes(sample["record"])), tuple(images)


def _read_meta(folder: Path, kind: ShardKind) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} is no folder of shards ({error}); write it with write_sft_shards or write_rl_shards."
        ) from error
    if meta.get("format") != FORMAT:
        raise DataError(
            f"{folder} has shard format {meta.get('format')!r}, this version reads {FORMAT}; write it anew."
        )
    if meta["kind"] != kind:
        raise DataError(f"{folder} holds {meta['kind']} rows where {kind} rows are needed.")
    return meta


def _open(folder: Path, rows: int) -> Any:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder))
    # not len(dataset), which is the share of one of the ranks that see each other
    held = sum(chunk["chunk_size"] for chunk in json.loads((folder / "index.json").read_text())["chunks"])
    if held != rows:
        raise DataError(f"{folder} holds {held} rows, its {META} says {rows}; write it anew.")
    return dataset
