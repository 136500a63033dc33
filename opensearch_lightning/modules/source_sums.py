"""Sums of a validation, by source and over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torchmetrics import Metric

COLUMNS = 3
"""Negative log-likelihood (nats), tokens right under greedy decoding, tokens."""


class SourceSums(Metric):
    """A table ``[S, 3]`` of the sums (:data:`COLUMNS`) of each of ``S`` sources, in float64; over all ranks when
    computed.

    Ranks may have seen different numbers of sources, and one none at all: all have the longest list of names then.
    """

    full_state_update = False
    table: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sources: tuple[str, ...] = ()
        self.add_state("table", torch.zeros(0, COLUMNS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, table_S3: Tensor, sources: tuple[str, ...]) -> None:
        """Add the sums of a batch with these sources."""
        self._grow(sources)
        self.table[: len(table_S3)] += table_S3.to(self.table)

    def compute(self) -> Tensor:
        """The table ``[S, 3]``; its rows are ``self.sources``."""
        return self.table

    def sync(self, *args: Any, **options: Any) -> None:
        """Give all ranks as many rows before they are added up."""
        if distributed.is_available() and distributed.is_initialized():
            lists: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(lists, self.sources)
            self._grow(max(lists, key=len))
        super().sync(*args, **options)

    def _grow(self, sources: tuple[str, ...]) -> None:
        missing = len(sources) - len(self.table)
        if missing > 0:
            self.sources = sources
            self.table = torch.cat([self.table, self.table.new_zeros(missing, COLUMNS)])
