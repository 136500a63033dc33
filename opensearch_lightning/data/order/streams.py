"""The stream of rows that batches and packs are cut from: epoch after epoch, each a function of seed and number."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.errors import ConfigurationError

Rows = NDArray[np.int64]
WINDOWS, SOURCES, PACKS = 1, 2, 3
"""What is drawn with the seed besides permutations of all rows: the order of batches in a window, the rows of a source,
the order of packs. The numbers keep their generators apart."""
_KEPT = 2
"""Epochs kept in memory: a batch may lie in two."""


class RowStream(Protocol):
    """Rows in the order of training, without end."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch."""
        ...

    def epoch(self, number: int) -> Rows:
        """The rows of epoch ``number``, from 0 without end."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Which rows lie in one file, for an order that reads few files at a time.

    Raises:
        ConfigurationError: ``window`` below 1.
    """

    of_row: Rows
    """Number of the chunk of each row."""
    window: int
    """Chunks whose rows are shuffled together."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigurationError(f"chunk_window counts chunks; got {self.window}, set at least 1, or null.")

    def of(self, rows: Rows) -> "Chunks":
        """The chunks of some of the rows."""
        return Chunks(of_row=self.of_row[rows], window=self.window)


class ShuffledRows:
    """Every row once an epoch; each epoch has its own permutation.

    With ``chunks`` the chunks are permuted, and rows are shuffled inside windows of so many chunks: a machine then
    reads, and fetches from far away, that many files at a time.

    Args:
        n_rows: number of rows.
        seed: seed of the permutations; more than one number tells streams of one seed apart.
        chunks: where the rows lie; ``None`` shuffles all rows together.
    """

    def __init__(self, *, n_rows: int, seed: int | tuple[int, ...], chunks: Chunks | None = None) -> None:
        self.rows_per_epoch = n_rows
        self._seed = (seed,) if isinstance(seed, int) else seed
        self._chunks = chunks
        self._kept: dict[int, Rows] = {}

    def epoch(self, number: int) -> Rows:
        """The rows of epoch ``number``."""
        if self._chunks is None:
            return permutation(self.rows_per_epoch, *self._seed, number)
        if number not in self._kept:
            _keep(self._kept, number, self._chunk_by_chunk(self._chunks, number))
        return self._kept[number]

    def _chunk_by_chunk(self, chunks: Chunks, number: int) -> Rows:
        rng = np.random.default_rng([*self._seed, number])
        places = rng.permutation(int(chunks.of_row.max(initial=-1)) + 1)
        return np.lexsort((rng.random(len(chunks.of_row)), places[chunks.of_row] // chunks.window))


class MixedRows:
    """Rows of several sources in fixed proportions.

    After any number of rows of an epoch each source has given its quota, rounded up or down. A source runs through
    permutations of its own, one behind the other, so no row of it comes again before all have come. An epoch has as
    many rows as the sources with a weight above 0 have together.

    Args:
        source_ids: source of each row.
        weights: weight of each source, at least one above 0; they need not sum to 1. 0 leaves a source out.
        seed: seed of the permutations.
        chunks: where the rows lie; ``None`` shuffles all rows of a source together.
    """

    def __init__(self, *, source_ids: Rows, weights: Sequence[float], seed: int, chunks: Chunks | None = None) -> None:
        own = [np.flatnonzero(source_ids == s) if weight > 0 else np.empty(0, int) for s, weight in enumerate(weights)]
        self.rows_per_epoch = sum(map(len, own))
        counts = apportion(self.rows_per_epoch, weights)
        sequence = interleave(counts)
        self._sources = [
            _Source(
                rows=rows,
                places=np.flatnonzero(sequence == s),
                stream=ShuffledRows(
                    n_rows=len(rows), seed=(seed, SOURCES, s), chunks=chunks.of(rows) if chunks else None
                ),
            )
            for s, rows in enumerate(own)
            if counts[s]
        ]
        self._kept: dict[int, Rows] = {}

    def epoch(self, number: int) -> Rows:
        """The rows of epoch ``number``."""
        if number not in self._kept:
            _keep(self._kept, number, self._mix(number))
        return self._kept[number]

    def _mix(self, number: int) -> Rows:
        mixed = np.empty(self.rows_per_epoch, dtype=np.int64)
        for source in self._sources:
            count = len(source.places)
            taken, _ = rows_at(source.stream, number * count, (number + 1) * count)
            mixed[source.places] = source.rows[taken]
        return mixed


@dataclass(frozen=True, kw_only=True)
class _Source:
    rows: Rows
    places: Rows
    stream: ShuffledRows


def row_stream(
    *,
    source_ids: Rows,
    sources: Sequence[str],
    weights: Mapping[str, float] | None,
    seed: int,
    chunks: Chunks | None = None,
) -> RowStream:
    """The stream of some rows: every row once an epoch, or in the proportions of ``weights``.

    Args:
        source_ids: source of each row, a place in ``sources``.
        sources: names of the sources.
        weights: weight of each source by name, 0 to leave it out; ``None``: every row once an epoch.
        seed: seed of the permutations.
        chunks: where the rows lie; ``None`` shuffles all rows together.

    Raises:
        ConfigurationError: a weight for an unknown source, none for a known one, one that is no finite number from 0,
            all 0, or one above 0 for a source without usable rows or too small for one row an epoch.
    """
    if weights is None:
        return ShuffledRows(n_rows=len(source_ids), seed=seed, chunks=chunks)
    known = f"the sources are {', '.join(sources)}"
    if unknown := sorted(weights.keys() - set(sources)):
        raise ConfigurationError(f"weights name {', '.join(unknown)}, but {known}.")
    if missing := [name for name in sources if name not in weights]:
        raise ConfigurationError(f"weights lack {', '.join(missing)}: give each source one, 0 leaves it out; {known}.")
    numbers = {name: weight if isinstance(weight, int | float) else -1 for name, weight in weights.items()}
    if wrong := {name: weights[name] for name, weight in numbers.items() if not 0 <= weight < float("inf")}:
        raise ConfigurationError(f"weights must be 0 or more, got {wrong}; {known}.")
    if not any(weights.values()):
        raise ConfigurationError(f"all weights are 0: give one source more; {known}.")
    held = np.bincount(source_ids, minlength=len(sources))
    if empty := [name for name, rows in zip(sources, held, strict=True) if weights[name] > 0 and not rows]:
        raise ConfigurationError(f"no usable row of {', '.join(empty)}, whose weight is above 0: set it to 0.")
    taking = [name for name in sources if weights[name] > 0]
    total = sum(int(rows) for name, rows in zip(sources, held, strict=True) if weights[name] > 0)
    counts = dict(zip(taking, apportion(total, [weights[name] for name in taking]), strict=True))
    if never := [name for name in taking if not counts[name]]:
        raise ConfigurationError(
            f"the weights give {', '.join(never)} no row of an epoch of {total}: raise its weight, or set it to 0."
        )
    return MixedRows(source_ids=source_ids, weights=[weights[name] for name in sources], seed=seed, chunks=chunks)


def rows_at(stream: RowStream, start: int, stop: int) -> tuple[Rows, Rows]:
    """Rows at the places ``start`` to ``stop`` of all epochs in a row, and the epoch of each."""
    places = np.arange(start, stop)
    epochs = places // stream.rows_per_epoch
    parts = [stream.epoch(int(e))[places[epochs == e] % stream.rows_per_epoch] for e in np.unique(epochs)]
    return (np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)), epochs


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to ``total`` and are ``weights`` to rounding (largest remainders)."""
    # to the largest first: the sum of large floats overflows
    parts = np.asarray(weights, dtype=float) / max(weights)
    shares = parts / parts.sum() * total
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: total - int(counts.sum())]] += 1
    return counts.tolist()


def interleave(counts: Sequence[int]) -> Rows:
    """A sequence that holds each ``s`` ``counts[s]`` times and spreads them: any beginning has the quota of each.

    The j-th of a source may come once its quota is above j, and must before it passes j + 1; earliest deadline first
    keeps all of them (the quota method of apportionment, as just-in-time scheduling).
    """
    total = sum(counts)
    waiting = heapq.merge(*(_windows(total, count, source) for source, count in enumerate(counts)))
    sequence = np.empty(total, dtype=np.int64)
    ready: list[tuple[int, int]] = []
    following = next(waiting, None)
    for place in range(total):
        while following is not None and following[0] <= place:
            heapq.heappush(ready, following[1:])
            following = next(waiting, None)
        sequence[place] = heapq.heappop(ready)[1]
    return sequence


def _windows(total: int, count: int, source: int) -> Iterator[tuple[int, int, int]]:
    """First and last place of each row of a source, with the source."""
    return ((j * total // count, -(-(j + 1) * total // count) - 1, source) for j in range(count))


def _keep(kept: dict[int, Rows], number: int, rows: Rows) -> None:
    if len(kept) >= _KEPT:
        del kept[next(iter(kept))]
    kept[number] = rows


@lru_cache(maxsize=4)
def permutation(n_rows: int, *seeds: int) -> Rows:
    """The permutation of a seed, kept for the next call."""
    return np.random.default_rng(seeds).permutation(n_rows)
