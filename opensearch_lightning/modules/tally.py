"""Figures of one optimizer update, gathered over its passes and ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Tally:
    """Sums and extremes by name.

    Every rank must use the same names, in the same order: their values travel as one vector.

    Example::

        tally = Tally()
        tally.add(tokens=mask.sum(), entropy=entropy.sum())
        tally.raise_to(ratio_max_error=worst)
        sums, highest = tally.over_ranks(trainer.strategy, device)
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._highest: dict[str, float] = defaultdict(float)

    def add(self, **values: Tensor | float) -> None:
        """Add to sums."""
        for name, value in values.items():
            self._sums[name] += float(value)

    def raise_to(self, **values: Tensor | float) -> None:
        """Raise extremes, which begin at 0."""
        for name, value in values.items():
            self._highest[name] = max(self._highest[name], float(value))

    def over_ranks(self, strategy: Any, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
        """Sums of all ranks, and extremes over all of them."""
        return (
            _reduced(self._sums, strategy, device, "sum"),
            _reduced(self._highest, strategy, device, "max"),
        )


def _reduced(values: dict[str, float], strategy: Any, device: torch.device, op: str) -> dict[str, float]:
    vector = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    return dict(zip(values, strategy.reduce(vector, reduce_op=op).tolist(), strict=True))
