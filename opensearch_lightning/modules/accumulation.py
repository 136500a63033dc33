"""Several backward passes for one update, on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.modules.optim import MuonAdamW
from opensearch_lightning.strategies import is_deepspeed, zero_stage

T = TypeVar("T")


def check_optimizer(trainer: L.Trainer, optimizer: Optimizer) -> None:
    """See that the strategy can run the optimizer; to be called in the module's ``configure_optimizers``.

    Raises:
        ConfigurationError: it works on whole matrices, and ZeRO gives it flat parts of them.
    """
    if is_deepspeed(trainer.strategy) and isinstance(optimizer, Muon | MuonAdamW):
        raise ConfigurationError(
            f"{type(optimizer).__name__} works on whole matrices, which ZeRO takes apart; use adamw, or train under DDP"
        )


def accumulate(trainer: L.Trainer, parts: list[T]) -> Iterator[tuple[T, AbstractContextManager[None]]]:
    """Each part of an update with the context that its backward pass must run in.

    Gradients travel between the ranks once, in or behind the last pass. That is faster, and it is what lets the ranks
    have different numbers of parts: a pass that synchronizes waits for every rank to make it. So every rank needs at
    least one part; under ZeRO-3 as many as the others (:func:`agree_on_passes`).

    DeepSpeed counts passes by calls of its engine, of which a ``training_step`` is one: gradients that it reduces in
    each pass would overwrite each other. So those of several passes are held whole on each rank until the last one, and
    the loop must run to its end before the optimizer's step. Where no rank has more than one pass, each gradient is
    shared, and freed, as soon as it is there.

    Example::

        for part, context in accumulate(self.trainer, parts):
            with context:
                self.manual_backward(loss_of(part))
    """
    strategy: Any = trainer.strategy
    # under ZeRO-3 the ranks have agreed already
    if is_deepspeed(strategy) and (len(parts) if zero_stage(strategy) == 3 else _most_parts(strategy, len(parts))) > 1:
        with strategy.deepspeed_engine.coalesce_grad_reduction():
            for part in parts:
                yield part, nullcontext()
        return
    for number, part in enumerate(parts, start=1):
        if number < len(parts) and isinstance(strategy, ParallelStrategy):
            yield part, strategy.block_backward_sync()
        else:
            yield part, nullcontext()


def _most_parts(strategy: Any, parts: int) -> int:
    return int(strategy.reduce(torch.tensor(parts, device=strategy.root_device), reduce_op="max"))


def agree_on_passes(trainer: L.Trainer, passes: int) -> int:
    """How many forward (and backward) passes this rank must make where it needs ``passes``.

    Under ZeRO-3 each pass gathers weights from all ranks, so all make as many as the rank that needs most, and the
    others fill up with passes that change nothing: a part whose loss is multiplied by 0. This holds for passes
    without a gradient too. Under other strategies it is ``passes`` itself. All ranks must call it together.
    """
    if zero_stage(trainer.strategy) != 3:
        return passes
    return _most_parts(trainer.strategy, passes)


def clip_and_step(
    trainer: L.Trainer, optimizer: Any, parameters: Iterable[Tensor], max_grad_norm: float | None
) -> float:
    """Limit the global gradient norm, make the optimizer's step, and return the norm before the limit.

    Under DeepSpeed the engine does both, with the ``gradient_clipping`` of its config
    (:func:`~opensearch_lightning.strategies.prepare_engine` puts the module's limit there); the arithmetic is the same.

    Args:
        trainer: whose strategy holds the gradients.
        optimizer: as ``module.optimizers()`` gives it.
        parameters: all that the optimizer trains.
        max_grad_norm: the limit, ``None`` for none.

    Raises:
        DataError: the norm is not finite, and the step would make weights of NaN. Under DeepSpeed, and where losses are
            scaled (float16), such a norm is theirs to deal with.
    """
    strategy: Any = trainer.strategy
    if is_deepspeed(strategy):
        optimizer.step()
        return float(strategy.deepspeed_engine.get_global_grad_norm())
    norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf))
    if not math.isfinite(norm) and trainer.scaler is None:
        raise DataError(
            f"the gradient norm of update {trainer.global_step} is {norm}, and a step would make weights of NaN: see "
            "whether the weights that training began with are finite, then go on from the last checkpoint with a lower "
            "learning rate"
        )
    optimizer.step()
    return norm
