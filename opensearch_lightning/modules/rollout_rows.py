"""The trajectories of a batch as rows, and what their rewards become.

Shapes: ``R`` rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opensearch_lightning.errors import DataError
from opensearch_lightning.types import NON_FATAL, RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutRows:
    """All trajectories of a batch, one after another. Tensors are ``[R]``, on the CPU.

    ``group_ids`` number the tasks in order of appearance; rows with ``valid`` false have no reward and no vote;
    ``kept_steps`` is the first step of each that carries no gradient.
    """

    trajectories: tuple[Trajectory, ...]
    group_ids: Tensor
    rewards: Tensor
    valid: Tensor
    is_fatal: Tensor
    kept_steps: Tensor

    @classmethod
    def of(cls, batch: RolloutBatch) -> RolloutRows:
        """The rows of ``batch``.

        Raises:
            DataError: the batch holds no trajectories, some sampled at different temperatures, or one whose tokens,
                rewards or mask cannot be.
        """
        trajectories = tuple(t for group in batch.groups for t in group.trajectories)
        if not trajectories:
            raise DataError(
                "the batch holds no trajectories: put RolloutGeneration before this module's training_step "
                "(callbacks=[…]), or fill batch.groups yourself"
            )
        temperatures = sorted({t.temperature for t in trajectories})
        if len(temperatures) > 1:
            raise DataError(
                f"trajectories of one batch were sampled at temperatures {temperatures}; sample a batch at one"
            )
        for trajectory in trajectories:
            _check(trajectory)
        for group in batch.groups:
            if group.kept_steps is not None and len(group.kept_steps) != len(group.trajectories):
                raise DataError(
                    f"group {group.task.id!r} has {len(group.trajectories)} trajectories but {len(group.kept_steps)} "
                    "kept steps: give one a trajectory, or None for all tokens"
                )
        numbers = {task_id: number for number, task_id in enumerate(dict.fromkeys(t.task_id for t in trajectories))}
        kept = [k for group in batch.groups for k in group.kept_steps or [NON_FATAL] * len(group.trajectories)]
        return cls(
            trajectories=trajectories,
            group_ids=torch.tensor([numbers[t.task_id] for t in trajectories]),
            rewards=torch.tensor([t.reward.total if t.reward else 0.0 for t in trajectories], dtype=torch.float64),
            valid=torch.tensor([t.reward is not None for t in trajectories]),
            is_fatal=torch.tensor([t.is_fatal for t in trajectories]),
            kept_steps=torch.tensor(kept),
        )

    @property
    def temperature(self) -> float:
        """The one temperature of all rows; greedy rows are taken at 1."""
        return self.trajectories[0].temperature or 1.0

    @property
    def n_groups(self) -> int:
        """Tasks."""
        return int(self.group_ids.max()) + 1

    def kept_tokens(self, row: int) -> int:
        """Tokens of ``row`` that carry gradient."""
        steps = self.trajectories[row].step_ids
        return int(((steps >= 0) & (steps < self.kept_steps[row])).sum())


@dataclass(frozen=True, kw_only=True)
class AdvantageRecord:
    """What the batch's rewards became; callbacks read it from ``module.last_advantages``.

    All tensors are ``[R]`` in the order of ``trajectories``; ``group_ids`` number the tasks; rows with ``valid`` false
    have no reward and no vote.
    """

    trajectories: tuple[Trajectory, ...]
    group_ids: Tensor
    valid: Tensor
    is_fatal: Tensor
    kept_steps: Tensor
    raw: Tensor
    advantages: Tensor


def _check(trajectory: Trajectory) -> None:
    """See that a trajectory can be trained on.

    Raises:
        DataError: it has no tokens, not one step id and one log-probability a token, or a number that is not finite.
    """
    name = f"rollout {trajectory.rollout} of task {trajectory.task_id!r}"
    lengths = [len(part) for part in (trajectory.token_ids, trajectory.step_ids, trajectory.sampling_logprobs)]
    if not lengths[0] or len(set(lengths)) > 1:
        raise DataError(
            f"{name} has {lengths[0]} tokens, {lengths[1]} step ids and {lengths[2]} sampling log-probabilities: give "
            "at least one token, and one of each a token"
        )
    strange = trajectory.sampling_logprobs[(trajectory.step_ids >= 0) & ~trajectory.sampling_logprobs.isfinite()]
    if len(strange):
        raise DataError(
            f"{name} was sampled with a log-probability of {float(strange[0])}: its engine cannot be right, leave the "
            "trajectory out"
        )
    if trajectory.reward is not None and not math.isfinite(trajectory.reward.total):
        raise DataError(
            f"the reward of {name} is {trajectory.reward.total}: leave it out (reward=None), or see to the judge"
        )
