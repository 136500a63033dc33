"""LitData shards of records with images: one layout for SFT rows and RL tasks.

A sample is ``{"record": JSON, "sizes": JSON list of byte counts, "blob": the images joined}``: lists of byte strings
and lists of varying length are what LitData refuses or silently cuts. The blob is a tensor of bytes because LitData
packs samples of plain bytes alone into record batches, and reads hundreds of rows to return one. Beside LitData's
``index.json`` stands ``shards.json`` with the kind of rows, their number and a digest of their contents.
"""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.errors import DataError

_META = "shards.json"
_FORMAT = 1
Record = tuple[Mapping[str, Any], Sequence[bytes]]
Shards = Path | str | Sequence[Path | str]


class ShardKind(StrEnum):
    """What the rows of a shard folder are."""

    SFT = "sft"
    RL = "rl"


def write_shards(records: Iterable[Record], out: Path | str, *, kind: ShardKind, chunk_bytes: int = 64 * 2**20) -> int:
    """Write records in their order; the same records give the same files.

    The folder appears whole or not at all: it is written beside its place and then renamed.

    Args:
        records: pairs of a JSON-able mapping and its images (encoded files). They are consumed one by one.
        out: folder to make.
        kind: what the rows are.
        chunk_bytes: size of a chunk file.

    Returns:
        Number of rows.

    Raises:
        DataError: ``out`` exists, there is no record, or a record is no JSON.
    """
    out = Path(out)
    if out.exists():
        raise DataError(f"{out} exists already; remove it, or write the shards to another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        rows, digest = _write_chunks(records, partial, chunk_bytes)
        if rows == 0:
            raise DataError(f"no rows to write to {out}.")
        _write_index(partial, digest)
        meta = {"format": _FORMAT, "kind": kind, "rows": rows, "digest": digest}
        (partial / _META).write_text(json.dumps(meta, indent=1) + "\n")
        partial.chmod(0o755)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return rows


def _write_chunks(records: Iterable[Record], folder: Path, chunk_bytes: int) -> tuple[int, str]:
    # LitData's `optimize` would start processes and leave folders in the temporary directory; this is the writer
    # that it runs in each of them. Imported late: litdata takes 500 MB.
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=chunk_bytes)
    digest = hashlib.sha256()
    rows = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
        for record, images in records:
            sample = _encode(record, images)
            for part in sample.values():
                digest.update(len(part).to_bytes(8, "big") + part)
            writer[rows] = {**sample, "blob": _tensor(sample["blob"])}
            rows += 1
        writer.done()
    return rows, digest.hexdigest()


def _write_index(folder: Path, digest: str) -> None:
    # `merge` of the writer waits for every rank of a process group and stamps the time; one process has written all.
    parts = list(folder.glob("*.index.json"))
    assert len(parts) == 1, f"{len(parts)} index files of one writer"
    index = json.loads(parts[0].read_text())
    parts[0].unlink()
    (folder / "index.json").write_text(json.dumps({**index, "updated_at": digest[:16]}, sort_keys=True))


def _encode(record: Mapping[str, Any], images: Sequence[bytes]) -> dict[str, bytes]:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"row {record.get('id')!r} cannot be stored as JSON: {error}.") from error
    return {
        "record": text,
        "sizes": json.dumps([len(image) for image in images]).encode(),
        "blob": b"".join(images),
    }


def _tensor(blob: bytes) -> Tensor:
    # `frombuffer` refuses an empty buffer, which is what a row without images has.
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)


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
        meta = json.loads((folder / _META).read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} is no folder of shards ({error}); write it with write_sft_shards or write_rl_shards."
        ) from error
    if meta.get("format") != _FORMAT:
        raise DataError(
            f"{folder} has shard format {meta.get('format')!r}, this version reads {_FORMAT}; write it anew."
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
        raise DataError(f"{folder} holds {held} rows, its {_META} says {rows}; write it anew.")
    return dataset
