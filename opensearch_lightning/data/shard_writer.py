"""Writing shards of records with images; :mod:`~opensearch_lightning.data.shards` says how they are laid out."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.data.digests import content_digest
from opensearch_lightning.data.shards import FORMAT, META, ShardKind
from opensearch_lightning.errors import DataError

Record = tuple[Mapping[str, Any], Sequence[bytes]]
"""A JSON-able mapping, and its images as encoded files."""


@dataclass(frozen=True, kw_only=True)
class WrittenChunks:
    """Chunk files that one writer made, as LitData's index describes them, and the digest of each row in hex."""

    files: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    digests: Sequence[str]


class ChunkWriter:
    """Appends rows to chunk files in a folder; they come out the same whatever else runs.

    Args:
        folder: an existing folder that holds no chunks.
        chunk_bytes: size of a chunk file.
    """

    def __init__(self, folder: Path, *, chunk_bytes: int) -> None:
        # LitData's `optimize` would leave folders in the temporary directory and stop only at its end; this is the
        # writer that it runs in each of its processes. Imported late: litdata takes 500 MB.
        from litdata.streaming.writer import BinaryWriter

        self._folder = folder
        self._writer = BinaryWriter(str(folder), chunk_bytes=chunk_bytes)
        self._digests: list[str] = []

    def add(self, record: Mapping[str, Any], images: Sequence[bytes]) -> str:
        """Append a row; returns its digest.

        Raises:
            DataError: the record is no JSON.
        """
        sample = _encode(record, images)
        digest = content_digest(*sample.values()).hex()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
            self._writer[len(self._digests)] = {**sample, "blob": _tensor(sample["blob"])}
        self._digests.append(digest)
        return digest

    def close(self) -> WrittenChunks:
        """Write what is left; without rows there are no files."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
            self._writer.done()
        # `merge` of LitData's writer waits for every rank of a process group and stamps the time.
        parts = list(self._folder.glob("*.index.json"))
        if not parts:
            return WrittenChunks(files=(), config={}, digests=())
        assert len(parts) == 1, f"{len(parts)} index files of one writer"
        index = json.loads(parts[0].read_text())
        parts[0].unlink()
        return WrittenChunks(files=index["chunks"], config=index["config"], digests=self._digests)


def write_index(folder: Path, chunks: WrittenChunks, *, kind: ShardKind, **more: Any) -> None:
    """Make a folder of chunk files a folder of shards.

    Args:
        folder: holds the files.
        chunks: all of them, in the order of their rows.
        kind: what the rows are.
        more: what else to say in ``shards.json``.
    """
    # of the rows alone: however they are cut into files, what was measured of them stays true
    digest = hashlib.sha256("".join(chunks.digests).encode()).hexdigest()
    index = {"chunks": chunks.files, "config": chunks.config, "updated_at": digest[:16]}
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))
    meta = {"format": FORMAT, "kind": kind, "rows": len(chunks.digests), "digest": digest, **more}
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


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
        writer = ChunkWriter(partial, chunk_bytes=chunk_bytes)
        for record, images in records:
            writer.add(record, images)
        chunks = writer.close()
        if not chunks.digests:
            raise DataError(f"no rows to write to {out}.")
        write_index(partial, chunks, kind=kind)
        partial.chmod(0o755)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return len(chunks.digests)


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
