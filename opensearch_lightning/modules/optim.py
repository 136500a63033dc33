"""Optimizers and learning-rate schedules, counted in optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from opensearch_lightning.errors import ConfigurationError

Schedule = Literal["constant", "linear", "cosine"]
_SCHEDULES = ("constant", "linear", "cosine")


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> AdamW:
    """AdamW on the trainable parameters; weight decay on matrices only, not on biases and norms.

    Raises:
        ConfigurationError: a learning rate that is none, or a model without a trainable parameter.
    """
    _check_lr(lr)
    parameters = _trainable(model)
    return AdamW(_decay_groups(parameters, weight_decay), lr=lr, betas=betas, eps=eps)


def muon_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> MuonAdamW:
    """Muon on the hidden matrices, AdamW on everything else, at one learning rate.

    Hidden matrices are the weights of linear layers except the output layer (which is the embedding where they are
    tied); Muon's update is scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``).

    Raises:
        ConfigurationError: a learning rate that is none, or a model without a trainable hidden matrix or without
            anything else to train.
    """
    _check_lr(lr)
    trainable = _trainable(model)
    hidden = {id(parameter) for parameter in _hidden_matrices(model)}
    matrices = [p for p in trainable if id(p) in hidden]
    others = [p for p in trainable if id(p) not in hidden]
    if not matrices or not others:
        raise ConfigurationError(
            f"muon_adamw found {len(matrices)} hidden matrices and {len(others)} other parameters to train; it needs "
            "both. Use adamw, or unfreeze the model."
        )
    muon = Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    return MuonAdamW(muon, AdamW(_decay_groups(others, weight_decay), lr=lr, betas=betas, eps=eps))


class MuonAdamW(Optimizer):
    """One optimizer made of two: schedulers, checkpoints and trainers see its groups and state as a whole.

    Args:
        muon: optimizer of the matrices.
        adamw: optimizer of the rest.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._parts: tuple[Muon, AdamW] = muon, adamw
        self._n_muon_groups = len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters; returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Handed over anew each time: `load_state_dict` replaces groups and state.
        groups = self.param_groups[: self._n_muon_groups], self.param_groups[self._n_muon_groups :]
        for part, part_groups in zip(self._parts, groups, strict=True):
            part.param_groups, part.state = part_groups, self.state
            part.step()
        return loss


def warmup_schedule(
    optimizer: Optimizer,
    *,
    schedule: Schedule = "constant",
    total_steps: int | None = None,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    min_ratio: float = 0.0,
) -> LambdaLR:
    """Linear warm-up, then a constant, linear or cosine course; to be stepped after each update.

    Update ``n`` (from 0) of ``W`` warm-up updates has the fraction ``(n+1)/W`` of the learning rate. Behind them the
    course falls from 1 at update ``W`` towards ``min_ratio`` at update ``total_steps``, and stays there.

    Args:
        optimizer: its groups' learning rates are scaled, each from its own.
        schedule: course after the warm-up.
        total_steps: updates of the whole training; needed for all but a constant without ``warmup_ratio``.
        warmup_steps: updates of the warm-up.
        warmup_ratio: warm-up as a fraction of ``total_steps``, rounded up, in place of ``warmup_steps``.
        min_ratio: fraction of the learning rate at the end.

    Raises:
        ConfigurationError: an unknown schedule, a missing total, or a warm-up that does not fit into it.
    """
    if schedule not in _SCHEDULES:
        raise ConfigurationError(f"schedule is {schedule!r}; set one of {', '.join(_SCHEDULES)}.")
    if total_steps is None and (schedule != "constant" or warmup_ratio > 0):
        raise ConfigurationError(f"a {schedule} schedule with warmup_ratio = {warmup_ratio} needs total_steps.")
    if warmup_ratio and warmup_steps:
        raise ConfigurationError(f"set warmup_steps (now {warmup_steps}) or warmup_ratio ({warmup_ratio}), not both.")
    warmup = math.ceil(warmup_ratio * total_steps) if total_steps is not None and warmup_ratio else warmup_steps
    if warmup < 0 or (total_steps is not None and warmup > total_steps):
        raise ConfigurationError(f"a warm-up of {warmup} updates does not fit into {total_steps}; shorten it.")

    def fraction(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        if schedule == "constant":
            return 1.0
        assert total_steps is not None
        progress = min(1.0, (update - warmup) / max(1, total_steps - warmup))
        course = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return min_ratio + (1 - min_ratio) * course

    return LambdaLR(optimizer, fraction)


def _check_lr(lr: float) -> None:
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        raise ConfigurationError(f"lr is {lr!r}; set a learning rate of 0 or more, such as 1e-5.")


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigurationError("the model has no trainable parameter; unfreeze some of it.")
    return parameters


def _decay_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _hidden_matrices(model: Any) -> list[Tensor]:
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
