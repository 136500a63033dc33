"""The usable rows of SFT shards: how long each is, which are cut, and from which source they come."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opensearch_lightning.chat import TokenizedSample
from opensearch_lightning.data.cut_rows import cut_lengths, cut_sample
from opensearch_lightning.data.drops import DropReason, DropReport
from opensearch_lightning.data.lengths import UNRENDERABLE, Lengths, lengths_file, measure
from opensearch_lightning.data.order.streams import Chunks, Rows
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.shards import ShardKind, ShardReader, Shards, folder_list

_log = logging.getLogger(__name__)
_NAMED = 5
TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, kw_only=True)
class RowOpener:
    """How rows are read, measured and chosen.

    The settings are those of :class:`~opensearch_lightning.data.SearchVLSFTDataModule`.
    """

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
            lengths = cut_lengths(
                self.source,
                lengths,
                max_length=opener.max_length,
                num_workers=opener.num_workers,
                folder=opener.lengths_dir,
            )
        self._places = _usable_places(self.source, lengths, opener)
        self.lengths = lengths[self._places]
        """Tokens of each row, those that are cut as they are then."""
        self._cut = too_long[self._places]
        if self.n_cut:
            names = [self.source.name(int(row)) for row in self._places[self._cut][:_NAMED]]
            _log.warning(
                "SFT shards: %d of %d rows were longer than %d tokens and are cut behind a turn of the policy: %s%s",
                self.n_cut,
                len(self),
                opener.max_length,
                ", ".join(names),
                ", …" if self.n_cut > _NAMED else "",
            )

    def __len__(self) -> int:
        return len(self._places)

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
        return ids[self._places]

    def chunks(self, window: int | None) -> Chunks | None:
        """Where the rows lie, for an order chunk by chunk; ``None`` without a window."""
        if window is None:
            return None
        sizes = self.source.reader.chunks
        return Chunks(of_row=np.repeat(np.arange(len(sizes)), sizes)[self._places], window=window)

    def sample(self, row: int) -> TokenizedSample:
        """Row ``row`` as tokens and images, cut if it is too long."""
        sample = self.source.sample(int(self._places[row]))
        if not self._cut[row]:
            return sample
        cut = cut_sample(self.source, sample, self._max_length)
        assert cut is not None, "rows whose first turn does not fit are not usable"
        return cut


def _usable_places(source: SampleSource, lengths: Lengths, opener: RowOpener) -> Rows:
    """Places in ``source`` of the rows that can be rendered and are not too long; the others are dropped and named.

    Raises:
        DataError: more than ``max_dropped`` of the rows are unusable; the message names them.
    """
    room = f"raise max_length={opener.max_length} (too_long=cut keeps of a row what fits)"
    is_long = bool((lengths > opener.max_length).any())
    report = DropReport("SFT shards", limit=opener.max_dropped, remedy=room if is_long else "mend the source")
    for reason, code in UNRENDERABLE.items():
        for index in np.flatnonzero(lengths == code):
            report.drop(reason, source.name(int(index)))
    for index in np.flatnonzero(lengths > opener.max_length):
        report.drop(DropReason.TOO_LONG, f"{source.name(int(index))}: {lengths[index]} tokens")
    places = np.flatnonzero((lengths >= 0) & (lengths <= opener.max_length))
    report.kept = len(places)
    report.check()
    if report.n_dropped:
        _log.warning("%s", report)
    return places
