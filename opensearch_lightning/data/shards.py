"""LitData shards of records with images: one layout for SFT rows and RL tasks.

A sample is ``{"record": JSON, "sizes": JSON list of byte counts, "blob": the images joined}``: lists of byte strings
and lists of varying length are what LitData refuses or silently cuts. The blob is a tensor of bytes because LitData
packs samples of plain bytes alone into record batches, and reads hundreds of rows to return one. Beside LitData's
``index.json`` stands ``shards.json`` with the kind of rows, their number, a digest of their contents and, if rows of
several sources were written, ``"sources": [[name, rows], …]`` in row order.
"""

import hashlib
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

from opensearch_lightning.data.remote import RemoteFolder, is_remote
from opensearch_lightning.errors import DataError, one_line

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
        folders: shard folders: paths, ``s3://bucket/prefix``, ``http(s)://host/path``.
        kind: what the rows must be.
        cache_dir: where files of folders on other machines are kept; each is fetched when a row of it is first read.
        storage_options: of the other machines; see :class:`~opensearch_lightning.data.remote.RemoteFolder`.

    Raises:
        DataError: a folder is missing, cannot be reached, holds no shards, damaged ones, or those of another kind; of a
            row, when its file is damaged.
        ConfigurationError: a folder lies on another machine and there is no ``cache_dir``.
    """

    def __init__(
        self,
        folders: Shards,
        *,
        kind: ShardKind,
        cache_dir: Path | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        listed = folder_list(folders)
        if not listed:
            raise DataError("no shard folder given.")
        self._folders = [_open(folder, kind, cache_dir, storage_options) for folder in listed]
        self.digest = hashlib.sha256("".join(folder.digest for folder in self._folders).encode()).hexdigest()
        self._ends = list(accumulate(folder.rows for folder in self._folders))
        self._sets: dict[int, Any] = {}
        self._pid = os.getpid()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        place = index - (self._ends[part - 1] if part else 0)
        self._folders[part].ready(place)
        try:
            sample = self._set(part)[place]
            blob = memoryview(sample["blob"].numpy())
            images, start = [], 0
            for size in json.loads(bytes(sample["sizes"])):
                images.append(bytes(blob[start : start + size]))
                start += size
            return json.loads(bytes(sample["record"])), tuple(images)
        # What LitData and the decoders raise on a file that is not what was written.
        except (OSError, RuntimeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise DataError(
                f"row {place} of {self._folders[part].local} cannot be read ({one_line(error)[:200]}); write or fetch "
                "the folder anew."
            ) from error

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """Names of the sources with their rows, as runs in row order; one without a name has its folder's."""
        return tuple(run for folder in self._folders for run in folder.sources)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows of each chunk file, in row order."""
        return tuple(rows for folder in self._folders for _, rows, _ in folder.chunks)

    def beside(self, name: str) -> Path | None:
        """A file that stands beside the chunks of a single folder; ``None`` if there is none.

        Raises:
            DataError: it cannot be fetched.
        """
        assert len(self._folders) == 1, "one folder"
        return self._folders[0].find(name)

    def _set(self, part: int) -> Any:
        # Processes that share an open file share the place in it, so one that was forked opens its own.
        if self._pid != os.getpid():
            self._sets, self._pid = {}, os.getpid()
        if part not in self._sets:
            from litdata import StreamingDataset

            self._sets[part] = StreamingDataset(str(self._folders[part].local))
        return self._sets[part]


def folder_list(folders: Shards) -> list[Path | str]:
    """One or more folders as a list."""
    return [folders] if isinstance(folders, Path | str) else list(folders or ())


@dataclass(frozen=True, kw_only=True)
class _Folder:
    local: Path
    rows: int
    digest: str
    sources: tuple[tuple[str, int], ...]
    chunks: tuple[tuple[str, int, int], ...]
    """Name, rows and bytes of each file."""
    chunk_ends: tuple[int, ...]
    remote: RemoteFolder | None

    def ready(self, row: int) -> None:
        """Fetch the chunk of a row."""
        if self.remote is not None:
            name, _, size = self.chunks[bisect_right(self.chunk_ends, row)]
            _check_size(self.remote.fetch(name, self.digest), size)

    def find(self, name: str) -> Path | None:
        """A file beside the chunks."""
        if self.remote is not None:
            return self.remote.find(name, self.digest)
        return self.local / name if (self.local / name).exists() else None


def _open(
    folder: Path | str, kind: ShardKind, cache_dir: Path | str | None, storage_options: Mapping[str, Any] | None
) -> _Folder:
    remote = RemoteFolder(str(folder), cache_dir, storage_options) if is_remote(folder) else None
    meta = _read_meta(folder, kind, remote)
    local = Path(folder) if remote is None else remote.fetch("index.json", meta["digest"]).parent
    chunks = _chunks(folder, local / "index.json")
    ends = tuple(accumulate(rows for _, rows, _ in chunks))
    # not the length of LitData's dataset, which is the share of one of the ranks that see each other
    held = ends[-1] if ends else 0
    if held != meta["rows"]:
        raise DataError(f"{folder} holds {held} rows, its {META} says {meta['rows']}; write it anew.")
    if remote is None:
        for name, _, size in chunks:
            _check_size(local / name, size)
    sources = _sources(folder, meta)
    return _Folder(
        local=local,
        rows=meta["rows"],
        digest=meta["digest"],
        sources=sources,
        chunks=chunks,
        chunk_ends=ends,
        remote=remote,
    )


def _chunks(folder: Path | str, index: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        listed = json.loads(index.read_text())["chunks"]
        chunks = tuple((str(c["filename"]), int(c["chunk_size"]), int(c["chunk_bytes"])) for c in listed)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder} has a damaged list of its files, {index} ({one_line(error)[:200]}); write or fetch it anew."
        ) from error
    if strange := [name for name, _, _ in chunks if Path(name).name != name]:
        raise DataError(f"{index} lists {strange[0]!r:.200}, which is no name of a file in its folder; write it anew.")
    return chunks


def _check_size(chunk: Path, size: int) -> None:
    # LitData would wait for the rest of it.
    held = chunk.stat().st_size if chunk.exists() else 0
    if held != size:
        raise DataError(
            f"{chunk} is damaged: it has {held} bytes, the index of its folder says {size}; write or fetch the folder "
            "anew."
        )


def _sources(folder: Path | str, meta: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    name = str(folder).rstrip("/").rsplit("/", 1)[-1]
    try:
        sources = tuple((str(source), int(rows)) for source, rows in meta.get("sources", [[name, meta["rows"]]]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder} has a damaged {META}: sources {meta['sources']!r:.80}; write it anew.") from error
    if sum(rows for _, rows in sources) != meta["rows"] or any(rows < 0 for _, rows in sources):
        raise DataError(f"{folder} holds {meta['rows']} rows, its sources {sources}; write it anew.")
    return sources


def _read_meta(folder: Path | str, kind: ShardKind, remote: RemoteFolder | None) -> dict[str, Any]:
    try:
        meta = json.loads(remote.read(META) if remote is not None else (Path(folder) / META).read_bytes())
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder} is no folder of shards ({error}); write it with `opensearch shard`, write_sft_shards or "
            "write_rl_shards."
        ) from error
    if not isinstance(meta, dict):
        raise DataError(
            f"{folder} is no folder of shards ({META} is a {type(meta).__name__}); write it with write_sft_shards or "
            "write_rl_shards."
        )
    if meta.get("format") != FORMAT:
        raise DataError(
            f"{folder} has shard format {meta.get('format')!r}, this version reads {FORMAT}; write it anew."
        )
    for name, of in {"kind": str, "rows": int, "digest": str}.items():
        if not isinstance(meta.get(name), of):
            raise DataError(f"{folder} has a damaged {META}: {name} is {meta.get(name)!r:.80}; write it anew.")
    if meta["kind"] != kind:
        raise DataError(f"{folder} holds {meta['kind']} rows where {kind} rows are needed.")
    return meta
