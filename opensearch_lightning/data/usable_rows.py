"""The usable rows of SFT shards: how long each is, which are cut, and from which source they come."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from opensearch_lightning.chat import TokenizedSample, cut_at_turn
from opensearch_lightning.data.lengths import Lengths, lengths_file, measure, read_lengths, usable, write_lengths
from opensearch_lightning.data.order.streams import Chunks, Rows
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.shards import ShardKind, ShardReader, Shards, folder_list

_log = logging.getLogger(__name__)
_NAMED = 5
TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, kw_only=True)
class RowOpener:
    """How rows are read, measured and chosen."""

    processor: Any
    max_length: int
    max_dropped: float
    too_long: TooLong
    render_tools: bool
    cached_tokens: int
    num_workers: int
    lengths_dir: Path | None
    cache_dir: Path | None
    storage_options: Mapping[str, Any] | None

    def open(self, folders: Shards) -> SampleSource:
        """The rows of some folders."""
        reader = ShardReader(
            folders, kind=ShardKind.SFT, cache_dir=self.cache_dir, storage_options=self.storage_options
        )
        return SampleSource(reader, self.processor, render_tools=self.render_tools, cached_tokens=self.cached_tokens)

    def lengths(self, folders: Shards) -> Lengths:
        """Tokens of every row, as :func:`~opensearch_lightning.data.lengths.measure` has them, folder by folder.

        Each folder's are looked for beside its chunks, then in ``lengths_dir``, and measured if they are in neither: a
        mixture of folders that were measured is not measured again.

        Raises:
            DataError: kept lengths are damaged, or not as many as the rows.
        """
        return np.concatenate([self._lengths(folder) for folder in folder_list(folders)])

    def _lengths(self, folder: Path | str) -> Lengths:
        source = self.open(folder)
        beside = source.reader.beside(lengths_file(Path(), source).name)
        return measure(
            source, num_workers=self.num_workers, folder=beside.parent if beside is not None else self.lengths_dir
        )


class SFTRows:
    """Usable rows of some shards, numbered from 0.

    Args:
        folders: shard folders.
        opener: how rows are read and chosen.

    Raises:
        DataError: shards are missing or too many rows are unusable.
    """

    def __init__(self, folders: Shards, opener: RowOpener) -> None:
        self.source = opener.open(folders)
        self._max_length = opener.max_length
        lengths = opener.lengths(folders)
        too_long = lengths > opener.max_length
        if opener.too_long == "cut":
            lengths = _cut_lengths(self.source, lengths, opener)
        self.rows, self.lengths = usable(
            self.source, lengths, max_length=opener.max_length, max_dropped=opener.max_dropped
        )
        self._cut = too_long[self.rows]
        if self.n_cut:
            names = [self.source.name(int(row)) for row in self.rows[self._cut][:_NAMED]]
            _log.warning(
                "SFT shards: %d of %d rows were longer than %d tokens and are cut behind a turn of the policy: %s%s",
                self.n_cut,
                len(self.rows),
                opener.max_length,
                ", ".join(names),
                ", …" if self.n_cut > _NAMED else "",
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_cut(self) -> int:
        """Rows that are cut."""
        return int(self._cut.sum())

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in order of appearance."""
        return tuple(dict.fromkeys(name for name, _ in self.source.reader.sources))

    @cached_property
    def source_ids(self) -> Rows:
        """Source of each row, a place in ``sources``."""
        runs = self.source.reader.sources
        ids = np.repeat([self.sources.index(name) for name, _ in runs], [rows for _, rows in runs])
        return ids[self.rows]

    def chunks(self, window: int | None) -> Chunks | None:
        """Where the rows lie, for an order chunk by chunk; ``None`` without a window."""
        if window is None:
            return None
        sizes = self.source.reader.chunks
        return Chunks(of_row=np.repeat(np.arange(len(sizes)), sizes)[self.rows], window=window)

    def sample(self, row: int) -> TokenizedSample:
        """Row ``row`` as tokens and images, cut if it is too long."""
        sample = self.source.sample(int(self.rows[row]))
        if not self._cut[row]:
            return sample
        cut = _cut(self.source, sample, self._max_length)
        assert cut is not None, "rows whose first turn does not fit are not usable"
        return cut


def _cut(source: SampleSource, sample: TokenizedSample, max_length: int) -> TokenizedSample | None:
    renderer = source.renderer
    return cut_at_turn(sample, max_length, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size)


def _cut_lengths(source: SampleSource, lengths: Lengths, opener: RowOpener) -> Lengths:
    """``lengths`` with those of cut rows; a row whose first turn of the policy does not fit stays too long."""
    rows = np.flatnonzero(lengths > opener.max_length)
    kept = opener.lengths_dir
    path = kept / f"cut-{source.digest[:32]}-{opener.max_length}.json" if kept is not None else None
    if path is not None and path.exists():
        cut = read_lengths(path, len(rows))
    else:
        loader = DataLoader(
            _CutRows(source, rows, opener.max_length),
            batch_size=None,
            num_workers=opener.num_workers if len(rows) > opener.num_workers else 0,
            generator=torch.Generator(),  # the global one stays as it is
        )
        cut = np.fromiter(loader, dtype=np.int64, count=len(rows))
        if path is not None:
            write_lengths(path, cut.tolist())
    shortened = lengths.copy()
    shortened[rows] = np.where(cut > 0, cut, lengths[rows])
    return shortened


class _CutRows(Dataset[int]):
    def __init__(self, source: SampleSource, rows: Rows, max_length: int) -> None:
        self._source, self._rows, self._max_length = source, rows, max_length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> int:
        cut = _cut(self._source, self._source.sample(int(self._rows[place])), self._max_length)
        return len(cut.token_ids) if cut is not None else 0
