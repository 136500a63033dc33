"""Advantages of trajectories relative to their group, and the one-sided clamp of fatal ones.

Shapes: ``B`` trajectories of any groups in any order, ``G`` groups. Groups go by id, never by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError, DataError

Estimator = Literal["grpo", "rloo"]
"""``grpo``: mean and standard deviation of the group; ``rloo``: mean of the others, no standard deviation."""

Baseline = Literal["all", "non_fatal"]
"""Whose rewards the statistics of a group are made of."""


def group_advantages(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    estimator: Estimator = "grpo",
    valid_B: Tensor | None = None,
    delta: float = 1e-6,
    *,
    normalize_std: bool = True,
    baseline: Baseline = "all",
    is_fatal_B: Tensor | None = None,
) -> Tensor:
    """Reward of each trajectory relative to its group, fatal ones included (appendix B.2).

    ``grpo``: ``r̃ = (r − mean) / (std + δ)`` with the population's standard deviation. ``rloo``: ``r̃ = r − mean of the
    others``, as in the released runs. No gradient flows through either.

    ``baseline="non_fatal"`` takes the mean over the non-fatal trajectories alone; fatal ones are measured against it.
    Beyond the paper: its clamp lets fatal trajectories pull the mean down and then takes their own share away, so that
    the advantages of a group sum to more than 0; here those of the non-fatal ones sum to 0, however many fatal ones
    stand beside them. The deviation stays that of all trajectories: that of a few alike could be next to nothing, and
    a fatal one's distance divided by it without bound.

    Args:
        rewards_B: rewards, floating.
        group_ids_B: int64, the prompt each belongs to.
        estimator: see above.
        valid_B: bool; rows that are not valid (a judge failed) have no vote and get 0, whatever their reward is.
        delta: keeps the quotient finite.
        normalize_std: divide by the deviation; ``rloo`` never does.
        baseline: see above.
        is_fatal_B: bool, needed for ``baseline="non_fatal"``.

    Returns:
        ``[B]`` of the rewards' type. Groups of one and groups of equal rewards get exactly 0; so do a group without a
        row that votes, and voters whose rewards are equal.

    Raises:
        ConfigurationError: if the estimator or the baseline is unknown, or fatal rows are not told.
        DataError: if a valid reward is not finite.
    """
    if estimator not in get_args(Estimator):
        raise ConfigurationError(f"advantage estimator {estimator!r} is unknown: choose from {get_args(Estimator)}")
    if baseline not in get_args(Baseline):
        raise ConfigurationError(f"advantage baseline {baseline!r} is unknown: choose from {get_args(Baseline)}")
    if baseline == "non_fatal" and is_fatal_B is None:
        raise ConfigurationError('baseline="non_fatal" needs is_fatal_B: say which rows are fatal')
    valid = torch.ones_like(group_ids_B, dtype=torch.bool) if valid_B is None else valid_B.bool()
    # float64: a difference of nearly equal float32 rewards is mostly rounding.
    rewards = torch.where(valid, rewards_B.detach().double(), 0.0)
    if not bool(rewards.isfinite().all()):
        row = int((~rewards.isfinite()).nonzero()[0])
        raise DataError(f"reward {rewards_B[row].item()} of row {row} is not finite: mark the row as not valid")
    votes = valid & ~is_fatal_B if baseline == "non_fatal" and is_fatal_B is not None else valid
    everyone, voters = _Groups.of(group_ids_B, valid), _Groups.of(group_ids_B, votes)
    total_B, count_B = voters.sums(rewards), voters.sums(torch.ones_like(rewards))
    if estimator == "rloo":
        own = votes.double()
        raw = rewards - (total_B - own * rewards) / (count_B - own).clamp(min=1)
    else:
        raw = rewards - total_B / count_B.clamp(min=1)
        if normalize_std:
            raw = raw / (everyone.deviation(rewards) + delta)
    # The mean of equal rewards is not always that reward, and δ is small enough to blow up the difference.
    differs_B = everyone.spread(rewards) & (voters.spread(rewards) | ~votes)
    return torch.where(valid & differs_B & (count_B > 0), raw, 0.0).to(rewards_B.dtype)


def clamp_fatal_advantages(advantages_B: Tensor, is_fatal_B: Tensor) -> Tensor:
    """One-sided clamp: ``Â = max(r̃, 0)`` for fatal trajectories, ``r̃`` for the others (Eq. 11).

    Args:
        advantages_B: from :func:`group_advantages`.
        is_fatal_B: bool.
    """
    return torch.where(is_fatal_B, advantages_B.clamp(min=0), advantages_B)


def clamp_bias(
    advantages_B: Tensor, is_fatal_B: Tensor, group_ids_B: Tensor, valid_B: Tensor | None = None
) -> dict[int, float]:
    """What the clamp adds to the mean advantage of each group: ``b = (1/G)·Σ_fatal max(0, −r̃)`` (section 4.2).

    Args:
        advantages_B: before the clamp.
        is_fatal_B: bool.
        group_ids_B: int64.
        valid_B: bool; rows that are not valid count neither above nor below.

    Returns:
        Bias by group id, for groups with at least one valid row.
    """
    group = _Groups.of(group_ids_B, valid_B)
    added = torch.where(is_fatal_B, (-advantages_B.detach().double()).clamp(min=0), 0.0)
    bias_B = group.sums(added) / group.sums(torch.ones_like(added)).clamp(min=1)
    ids = group_ids_B.tolist()
    return {ids[row]: float(bias_B[row]) for row in group.valid_B.nonzero().flatten().tolist()}


@dataclass(frozen=True)
class _Groups:
    index_B: Tensor  # position of each row's group, 0..G-1
    valid_B: Tensor
    size: int

    @classmethod
    def of(cls, group_ids_B: Tensor, valid_B: Tensor | None) -> _Groups:
        ids, index_B = group_ids_B.unique(return_inverse=True)
        valid = torch.ones_like(group_ids_B, dtype=torch.bool) if valid_B is None else valid_B.bool()
        return cls(index_B, valid, len(ids))

    def sums(self, values_B: Tensor) -> Tensor:
        """Sum over the valid rows of each row's group."""
        kept = torch.where(self.valid_B, values_B, 0.0)
        return kept.new_zeros(self.size).index_add(0, self.index_B, kept)[self.index_B]

    def deviation(self, values_B: Tensor) -> Tensor:
        """Population standard deviation of the valid values of each row's group."""
        count_B = self.sums(torch.ones_like(values_B)).clamp(min=1)
        centered = values_B - self.sums(values_B) / count_B
        return (self.sums(centered**2) / count_B).sqrt()

    def spread(self, values_B: Tensor) -> Tensor:
        """Whether the valid values of each row's group differ."""
        low = values_B.new_full((self.size,), torch.inf)
        low = low.scatter_reduce(0, self.index_B, torch.where(self.valid_B, values_B, torch.inf), "amin")
        high = values_B.new_full((self.size,), -torch.inf)
        high = high.scatter_reduce(0, self.index_B, torch.where(self.valid_B, values_B, -torch.inf), "amax")
        return (high > low)[self.index_B]
