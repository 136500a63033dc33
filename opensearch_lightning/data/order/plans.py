"""Plans of fine-tuning: which rows each rank reads in which passes of which update.

A plan is a function of its arguments and the number of an update. It keeps what it worked out in its process, so a
process that starts others plans first and they inherit it.
"""

from functools import cached_property
from typing import Protocol

import numpy as np

from opensearch_lightning.data.order.epochs import LengthOrder, check_batch
from opensearch_lightning.data.order.packs import fill_share, full_packs, padded_passes, spread_packs
from opensearch_lightning.data.order.streams import PACKS, Rows, RowStream, rows_at


class Plan(Protocol):
    """Rows of the passes of each update."""

    def passes(self, number: int, rank: int) -> list[Rows]:
        """Rows of each pass of ``rank`` in update ``number`` (from 0, without end)."""
        ...

    def epoch_of(self, number: int) -> int:
        """The epoch in which update ``number`` begins."""
        ...

    @property
    def steps_per_epoch(self) -> float:
        """Updates of an epoch."""
        ...

    @property
    def efficiency(self) -> float:
        """Share of the first epoch's places in passes that hold a token, not padding or unused budget."""
        ...


class PaddedPlan:
    """Rows of similar length, padded to the longest of a pass.

    Args:
        order: the batches, all ranks together.
        lengths: tokens of each row.
        world_size: number of ranks.
        micro_batch: most rows of a pass; ``None`` for any number.
        max_tokens: most tokens of a pass, padding counted; ``None`` for any number.
    """

    def __init__(
        self,
        order: LengthOrder,
        *,
        lengths: Rows,
        world_size: int,
        micro_batch: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._order, self._lengths, self._world_size = order, lengths, world_size
        self._micro_batch, self._max_tokens = micro_batch, max_tokens
        self.steps_per_epoch = order.steps_per_epoch

    def passes(self, number: int, rank: int) -> list[Rows]:
        """Rows of each pass of ``rank`` in update ``number``, from short to long."""
        # Every n-th of rows sorted by length: the ranks get about as many tokens each.
        own = self._order.batch(number)[rank :: self._world_size]
        return padded_passes(own, self._lengths, micro_batch=self._micro_batch, max_tokens=self._max_tokens)

    def epoch_of(self, number: int) -> int:
        """The epoch in which update ``number`` begins."""
        return self._order.epoch_of(number)

    @cached_property
    def efficiency(self) -> float:
        """Share of the first epoch's padded batches that is no padding."""
        steps = range(int(self.steps_per_epoch))
        passes = [one for n in steps for rank in range(self._world_size) for one in self.passes(n, rank)]
        places = sum(len(one) * int(self._lengths[one].max()) for one in passes)
        return sum(int(self._lengths[one].sum()) for one in passes) / places


class BatchPackPlan:
    """The rows of each update in packs, spread over the ranks: Table 4's batch, which counts trajectories.

    Args:
        stream: the rows in their order.
        lengths: tokens of each row, none above ``pack_tokens``.
        batch_size: rows of an update, all ranks together.
        world_size: number of ranks.
        pack_tokens: most tokens of a pack.

    Raises:
        ConfigurationError: fewer rows than an update needs.
    """

    def __init__(self, stream: RowStream, *, lengths: Rows, batch_size: int, world_size: int, pack_tokens: int) -> None:
        check_batch(stream.rows_per_epoch, batch_size)
        self._stream, self._lengths = stream, lengths
        self._batch_size, self._world_size, self._pack_tokens = batch_size, world_size, pack_tokens
        self.steps_per_epoch = stream.rows_per_epoch / batch_size

    def passes(self, number: int, rank: int) -> list[Rows]:
        """Rows of each pack of ``rank`` in update ``number``, the fullest pack first."""
        return self._packs(number)[rank]

    def epoch_of(self, number: int) -> int:
        """The epoch in which update ``number`` begins."""
        return number * self._batch_size // self._stream.rows_per_epoch

    @cached_property
    def efficiency(self) -> float:
        """Share of the first epoch's packs that holds tokens."""
        steps = range(int(self.steps_per_epoch))
        packs = [pack for number in steps for share in self._packs(number) for pack in share]
        return fill_share(packs, self._lengths, self._pack_tokens)

    def _packs(self, number: int) -> list[list[Rows]]:
        rows, _ = rows_at(self._stream, number * self._batch_size, (number + 1) * self._batch_size)
        shares = spread_packs(self._lengths[rows], self._world_size, self._pack_tokens)
        return [[rows[pack] for pack in share] for share in shares]


class FullPackPlan:
    """Full packs, ``batch_size`` on each rank: the number of tokens of an update is about constant, not that of rows.

    Each epoch holds the stream's rows once. It is planned whole when one of its updates is first asked for, and those
    before it for their number of updates.

    Args:
        stream: the rows in their order.
        lengths: tokens of each row, none above ``pack_tokens``.
        batch_size: packs of an update on one rank.
        world_size: number of ranks.
        pack_tokens: most tokens of a pack.
        seed: seed of the order of packs.
        window: rows packed together.
    """

    def __init__(
        self,
        stream: RowStream,
        *,
        lengths: Rows,
        batch_size: int,
        world_size: int,
        pack_tokens: int,
        seed: int,
        window: int = 8192,
    ) -> None:
        self._stream, self._lengths = stream, lengths
        self._world_size, self._pack_tokens = world_size, pack_tokens
        self._each_update = batch_size * world_size
        self._seed, self._window = seed, window
        self._updates: list[int] = []
        self._planned: tuple[int, list[Rows]] | None = None

    def passes(self, number: int, rank: int) -> list[Rows]:
        """Rows of each pack of ``rank`` in update ``number``."""
        epoch, place = self._find(number)
        packs = self._epoch(epoch)[place * self._each_update : (place + 1) * self._each_update]
        packs = sorted(packs, key=lambda pack: -int(self._lengths[pack].sum()))
        return packs[rank :: self._world_size]

    def epoch_of(self, number: int) -> int:
        """The epoch of update ``number``."""
        return self._find(number)[0]

    @property
    def steps_per_epoch(self) -> int:
        """Updates of the first epoch; those of others differ by a few."""
        return self._number_of_updates(0)

    @cached_property
    def efficiency(self) -> float:
        """Share of the first epoch's packs that holds tokens."""
        return fill_share(self._epoch(0), self._lengths, self._pack_tokens)

    def _find(self, number: int) -> tuple[int, int]:
        """The epoch of an update, and the update's place in it."""
        epoch = 0
        while number >= (updates := self._number_of_updates(epoch)):
            epoch, number = epoch + 1, number - updates
        return epoch, number

    def _number_of_updates(self, epoch: int) -> int:
        while len(self._updates) <= epoch:
            self._epoch(len(self._updates))
        return self._updates[epoch]

    def _epoch(self, epoch: int) -> list[Rows]:
        if self._planned is None or self._planned[0] != epoch:
            packs = full_packs(
                self._stream.epoch(epoch),
                self._lengths,
                self._pack_tokens,
                rng=np.random.default_rng([self._seed, epoch, PACKS]),
                multiple=self._each_update,
                window=self._window,
            )
            self._planned = epoch, packs
            if epoch == len(self._updates):
                self._updates.append(len(packs) // self._each_update)
        return self._planned[1]
