"""Writing shards of records with images; :mod:`~opensearch_lightning.data.shards` says how they are laid out."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.data.shards import FORMAT, META, ShardKind
from opensearch_lightning.errors import DataError

Record = tuple[Mapping[str, Any], Sequence[bytes]]
"""A JSON-able mapping, and its images as encoded files."""


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
        meta = {"format": FORMAT, "kind": kind, "rows": rows, "digest": digest}
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n")
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
