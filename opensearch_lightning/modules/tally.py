"""Figures of one optimizer update, gathered over its passes and ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_OF_A_TOKEN = frozenset(
    {
        "train/clip_fraction",
        "train/entropy",
        "train/mismatch",
        "train/mismatch_kl",
        "train/importance_capped",
    }
)


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
        """Raise extremes, which begin at 0; NaN stays."""
        for name, value in values.items():
            number = float(value)
            # max() would drop a NaN that comes second, and keeps one that comes first
            self._highest[name] = number if math.isnan(number) else max(self._highest[name], number)

    def over_ranks(self, strategy: Any, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
        """Sums of all ranks, and extremes over all of them."""
        return (
            _reduced(self._sums, strategy, device, "sum"),
            _reduced(self._highest, strategy, device, "max"),
        )


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of a step from those of its updates.

    Figures of a token are weighted by the update's trained tokens: an update whose groups all have equal rewards has
    none. Largest ones stay the largest, tokens add up, and the rest are means. The ratio's largest error is that of the
    first update with tokens: there the policy is the one that sampled, and what differs from 1 is engine against
    trainer.
    """
    tokens = [update["train/trained_tokens"] for update in updates]
    all_tokens = sum(tokens)
    first = next((update for update, count in zip(updates, tokens, strict=True) if count), updates[0])
    figures: dict[str, float] = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        if name in _OF_A_TOKEN and all_tokens:
            figures[name] = sum(value * n for value, n in zip(values, tokens, strict=True)) / all_tokens
        else:
            figures[name] = sum(values) / len(values)
    figures["train/trained_tokens"] = all_tokens
    figures["train/ratio_max_error"] = first["train/ratio_max_error"]
    if "train/mismatch_max" in figures:
        figures["train/mismatch_max"] = max(update["train/mismatch_max"] for update in updates)
    return figures


def _reduced(values: dict[str, float], strategy: Any, device: torch.device, op: str) -> dict[str, float]:
    vector = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    return dict(zip(values, strategy.reduce(vector, reduce_op=op).tolist(), strict=True))
