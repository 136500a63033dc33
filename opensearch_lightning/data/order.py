"""The order of rows: a pure function of the seed and the number of a batch.

Nothing of it depends on what was read before, so training resumes by a number alone.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.errors import ConfigurationError

Rows = NDArray[np.int64]


class EpochOrder:
    """Batches of distinct rows; each epoch has its own permutation and ``n_rows // batch_size`` batches.

    The rows that do not fill an epoch's last batch wait for another epoch, so no batch holds a row twice.

    Args:
        n_rows: number of rows.
        batch_size: rows of a batch, all ranks together.
        seed: seed of the permutations.

    Raises:
        ConfigurationError: fewer rows than a batch needs.
    """

    def __init__(self, *, n_rows: int, batch_size: int, seed: int) -> None:
        _check(n_rows, batch_size)
        self._n_rows, self._batch_size, self._seed = n_rows, batch_size, seed

    def batch(self, number: int) -> Rows:
        """Rows of batch ``number`` (from 0, without end)."""
        epoch, place = divmod(number, self._n_rows // self._batch_size)
        start = place * self._batch_size
        return _permutation(self._n_rows, self._seed, epoch)[start : start + self._batch_size]


class LengthOrder:
    """Batches of rows of similar length; every row comes exactly once an epoch.

    The permutations of all epochs form one endless stream. A window of it is sorted by length, cut into batches, and
    the batches are shuffled: batches stay random while their padding stays small. A window is no longer than an
    epoch, and rows of two epochs in one window are sorted apart, so a row meets itself in no batch but, rarely, the
    one where two epochs join.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch, all ranks together.
        seed: seed of the permutations.
        window: batches of a window; 1 sorts nothing but the rows inside a batch.

    Raises:
        ConfigurationError: fewer rows than a batch needs, or no window.
    """

    def __init__(self, *, lengths: Rows, batch_size: int, seed: int, window: int = 64) -> None:
        _check(len(lengths), batch_size)
        if window < 1:
            raise ConfigurationError(f"window counts the batches sorted together; got {window}, set at least 1.")
        self._lengths = lengths
        self._batch_size, self._seed = batch_size, seed
        self._window = min(window, len(lengths) // batch_size)
        self._planned: tuple[int, Rows] | None = None

    def batch(self, number: int) -> Rows:
        """Rows of batch ``number`` (from 0, without end), from short to long."""
        window, place = divmod(number, self._window)
        if self._planned is None or self._planned[0] != window:
            self._planned = window, self._plan(window)
        return self._planned[1][place]

    def _plan(self, window: int) -> Rows:
        n_rows, size = len(self._lengths), self._window * self._batch_size
        places = np.arange(window * size, (window + 1) * size)
        epochs = places // n_rows
        rows = np.concatenate(
            [_permutation(n_rows, self._seed, int(e))[places[epochs == e] % n_rows] for e in np.unique(epochs)]
        )
        batches = rows[np.lexsort((self._lengths[rows], epochs))].reshape(self._window, self._batch_size)
        # 1 keeps this generator apart from those of the permutations.
        return np.random.default_rng([self._seed, window, 1]).permutation(batches)


def _check(n_rows: int, batch_size: int) -> None:
    if not 1 <= batch_size <= n_rows:
        raise ConfigurationError(
            f"a batch takes {batch_size} distinct rows (all ranks together) of {n_rows}; set it in [1, {n_rows}]."
        )


@lru_cache(maxsize=4)
def _permutation(n_rows: int, seed: int, epoch: int) -> Rows:
    return np.random.default_rng([seed, epoch]).permutation(n_rows)
