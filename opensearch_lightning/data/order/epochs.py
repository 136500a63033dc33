"""The rows of each batch: a pure function of the seed and the number of the batch."""

import numpy as np

from opensearch_lightning.data.order.streams import WINDOWS, Rows, RowStream, ShuffledRows, permutation, rows_at
from opensearch_lightning.errors import ConfigurationError


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
        check_batch(n_rows, batch_size)
        self._n_rows, self._batch_size, self._seed = n_rows, batch_size, seed

    def batch(self, number: int) -> Rows:
        """Rows of batch ``number`` (from 0, without end)."""
        epoch, place = divmod(number, self._n_rows // self._batch_size)
        start = place * self._batch_size
        return permutation(self._n_rows, self._seed, epoch)[start : start + self._batch_size]


class LengthOrder:
    """Batches of rows of similar length; every row comes exactly once an epoch.

    The epochs of the stream form one endless row. A window of it is sorted by length, cut into batches, and the batches
    are shuffled: batches stay random while their padding stays small. A window is no longer than an epoch, and rows of
    two epochs in one window are sorted apart, so a row meets itself in no batch but, rarely, the one where two epochs
    join.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch, all ranks together.
        seed: seed of the permutations.
        window: batches of a window; 1 sorts nothing but the rows inside a batch.
        stream: the rows in their order; by default each epoch is a permutation of all.

    Raises:
        ConfigurationError: fewer rows than a batch needs, or no window.
    """

    def __init__(
        self, *, lengths: Rows, batch_size: int, seed: int, window: int = 64, stream: RowStream | None = None
    ) -> None:
        self._stream = stream or ShuffledRows(n_rows=len(lengths), seed=seed)
        self._n_rows = self._stream.rows_per_epoch
        check_batch(self._n_rows, batch_size)
        if window < 1:
            raise ConfigurationError(f"window counts the batches sorted together; got {window}, set at least 1.")
        self._lengths = lengths
        self._batch_size, self._seed = batch_size, seed
        self._window = min(window, self._n_rows // batch_size)
        self._planned: tuple[int, Rows] | None = None

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which an epoch's rows come once."""
        return self._n_rows / self._batch_size

    def epoch_of(self, number: int) -> int:
        """The epoch in which batch ``number`` begins."""
        return number * self._batch_size // self._n_rows

    def batch(self, number: int) -> Rows:
        """Rows of batch ``number`` (from 0, without end), from short to long."""
        window, place = divmod(number, self._window)
        if self._planned is None or self._planned[0] != window:
            self._planned = window, self._plan(window)
        return self._planned[1][place]

    def _plan(self, window: int) -> Rows:
        size = self._window * self._batch_size
        rows, epochs = rows_at(self._stream, window * size, (window + 1) * size)
        batches = rows[np.lexsort((self._lengths[rows], epochs))].reshape(self._window, self._batch_size)
        return np.random.default_rng([self._seed, window, WINDOWS]).permutation(batches)


def check_batch(n_rows: int, batch_size: int) -> None:
    """Refuse a batch that takes more rows than there are.

    Raises:
        ConfigurationError: naming both.
    """
    if not 1 <= batch_size <= n_rows:
        raise ConfigurationError(
            f"a batch takes {batch_size} distinct rows of {n_rows} (batch_size or prompts_per_step, of all ranks); "
            f"set it in [1, {n_rows}]."
        )
