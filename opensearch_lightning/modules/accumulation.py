"""Several backward passes for one update, on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy

T = TypeVar("T")


def accumulate(trainer: L.Trainer, parts: list[T]) -> Iterator[tuple[T, AbstractContextManager[None]]]:
    """Each part of an update with the context that its backward pass must run in.

    Gradients travel between the ranks in the last pass only. That is faster, and it is what lets the ranks have
    different numbers of parts: a pass that synchronizes waits for every rank to make it. So every rank needs at least
    one part.

    Example::

        for part, context in accumulate(self.trainer, parts):
            with context:
                self.manual_backward(loss_of(part))
    """
    strategy = trainer.strategy
    for number, part in enumerate(parts, start=1):
        if number < len(parts) and isinstance(strategy, ParallelStrategy):
            yield part, strategy.block_backward_sync()
        else:
            yield part, nullcontext()
