"""The clipped policy-gradient loss and its aggregations.

Shapes: ``B`` trajectories, ``T`` tokens. Whatever stands at masked positions, NaN included, reaches neither the loss
nor a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError

Aggregation = Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"]
"""How values of tokens become one: mean of trajectory means (Eq. 12), mean of trajectory sums (Table 5), token mean."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss to be minimised, with gradient, and what to log beside it, without.

    All are scalars. Figures over no kept token are 0.
    """

    loss: Tensor
    n_tokens: Tensor
    """Kept tokens."""
    clip_fraction: Tensor
    """Share of kept tokens whose gradient the clip took away."""
    ratio_mean: Tensor
    """Mean of ``ρ`` over kept tokens."""
    ratio_max_error: Tensor
    """Largest ``|ρ − 1|`` over kept tokens: 0 when the policy has not moved since ``old_logprobs``."""
    kl: Tensor
    """Aggregated ``KL(π_θ ‖ π_ref)``; 0 without a reference."""
    entropy: Tensor
    """Aggregated entropy of the policy, in nats; 0 where it is not given."""


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    loss_mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregation: Aggregation = "seq-mean-token-mean",
    denominator: float | Tensor | None = None,
    *,
    ref_logprobs_BT: Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy_BT: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    importance_weights_BT: Tensor | None = None,
) -> PolicyLoss:
    """Negated objective of fatal-aware GRPO (Eq. 12).

    ``w·min(ρ·Â, clip(ρ, 1 − clip_low, 1 + clip_high)·Â)`` with ``ρ = π_θ/π_old``, minus ``kl_coefficient`` times the
    low-variance estimate of ``KL(π_θ ‖ π_ref)``, plus ``entropy_coefficient`` times the entropy, each aggregated over
    the kept tokens.

    Args:
        logprobs_BT: of the policy now, with gradient.
        old_logprobs_BT: of the policy before the update.
        advantages_B: one a trajectory, clamped or not.
        loss_mask_BT: bool, kept tokens. A trajectory without any adds 0 and counts in means over trajectories.
        clip_low: how far below 1 a ratio still has gradient.
        clip_high: how far above 1 a ratio still has gradient.
        aggregation: see :data:`Aggregation`.
        denominator: trajectories (for means over trajectories) or kept tokens (``"token-mean"``) to divide by.
            ``None``: those of this batch. With the count of the whole batch, losses of its parts add up to its loss,
            however it was cut.
        ref_logprobs_BT: of the reference, needed for ``kl_coefficient > 0``.
        kl_coefficient: ``β``.
        entropy_BT: of the policy now, with gradient, needed for ``entropy_coefficient``.
        entropy_coefficient: weight of the entropy, which is sought.
        importance_weights_BT: ``w``, see :func:`~opensearch_lightning.algorithms.truncated_importance_weights`;
            ``None`` is 1 everywhere.

    Raises:
        ConfigurationError: if a clip range is negative, the aggregation unknown, or a coefficient lacks what it weighs.
    """
    if clip_low < 0 or clip_high < 0:
        raise ConfigurationError(f"clip=({clip_low}, {clip_high}) must not be negative; the paper's is (0.2, 0.28)")
    if kl_coefficient and ref_logprobs_BT is None:
        raise ConfigurationError(f"kl_coefficient={kl_coefficient} needs ref_logprobs; give them, or set it to 0")
    if entropy_coefficient and entropy_BT is None:
        raise ConfigurationError(f"entropy_coefficient={entropy_coefficient} needs entropy_BT; give it, or set it to 0")
    mask_BT = loss_mask_BT.bool()
    # All gradient passes here, so nothing that comes back as NaN from a masked position gets further.
    logprobs_BT = _kept(logprobs_BT, mask_BT)
    ratio_BT = (logprobs_BT - _kept(old_logprobs_BT.detach(), mask_BT)).exp()
    plain_BT = ratio_BT * advantages_B.detach()[:, None]
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_B.detach()[:, None]
    surrogate_BT = torch.minimum(plain_BT, clipped_BT)
    if importance_weights_BT is not None:
        surrogate_BT = surrogate_BT * _kept(importance_weights_BT.detach(), mask_BT)
    loss = aggregate(-surrogate_BT, mask_BT, aggregation, denominator)
    kl = entropy = loss.new_zeros(())
    if ref_logprobs_BT is not None:
        kl_BT = low_variance_kl(logprobs_BT, ref_logprobs_BT.detach())
        kl = aggregate(kl_BT, mask_BT, aggregation, denominator)
        loss = loss + kl_coefficient * kl
    if entropy_BT is not None:
        entropy = aggregate(entropy_BT, mask_BT, aggregation, denominator)
        loss = loss - entropy_coefficient * entropy
    ratio_error_BT = _kept(ratio_BT.detach() - 1, mask_BT)
    n_tokens = mask_BT.sum()
    return PolicyLoss(
        loss=loss,
        n_tokens=n_tokens,
        clip_fraction=(clipped_BT < plain_BT).sum() / n_tokens.clamp(min=1),
        ratio_mean=_kept(ratio_BT.detach(), mask_BT).sum() / n_tokens.clamp(min=1),
        ratio_max_error=ratio_error_BT.abs().max() if mask_BT.numel() else loss.new_zeros(()),
        kl=kl.detach(),
        entropy=entropy.detach(),
    )


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, denominator: float | Tensor | None = None
) -> Tensor:
    """One value from those of the kept tokens.

    Args:
        values_BT: anything at masked positions.
        mask_BT: bool, kept tokens.
        aggregation: see :data:`Aggregation`.
        denominator: as in :func:`policy_loss`; 0 is read as 1, so a batch with nothing to train gives 0.

    Raises:
        ConfigurationError: if the aggregation is unknown.
    """
    if aggregation not in get_args(Aggregation):
        raise ConfigurationError(f"loss aggregation {aggregation!r} is unknown: choose from {get_args(Aggregation)}")
    sum_B, count_B = _kept(values_BT, mask_BT).sum(-1), mask_BT.sum(-1)
    if denominator is None:
        denominator = count_B.sum() if aggregation == "token-mean" else len(count_B)
    if aggregation == "seq-mean-token-mean":
        sum_B = sum_B / count_B.clamp(min=1)
    divisor = torch.as_tensor(denominator, device=sum_B.device)
    return sum_B.sum() / torch.where(divisor > 0, divisor, torch.ones_like(divisor))


def low_variance_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Estimate of ``KL(π_θ ‖ π_ref)`` at each token: ``exp(d) − d − 1`` with ``d = log π_ref − log π_θ`` (Eq. 12).

    Args:
        logprobs_BT: of the policy, which sampled the tokens.
        ref_logprobs_BT: of the reference.

    Returns:
        Not negative, and 0 only where both agree.
    """
    difference_BT = ref_logprobs_BT - logprobs_BT
    return difference_BT.exp() - difference_BT - 1


def kl_penalized_rewards(
    rewards_B: Tensor, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, kl_coefficient: float
) -> Tensor:
    """``r − β·Σ_t (log π − log π_ref)`` over the tokens of the mask: the penalty inside the reward, not in the loss.

    The sum over all sampled tokens is the sampled estimate of the KL divergence between the two distributions over
    whole trajectories; it may be negative. No gradient.

    Args:
        rewards_B: before the penalty.
        logprobs_BT: of the policy that sampled.
        ref_logprobs_BT: of the reference.
        mask_BT: bool, which tokens to sum over.
        kl_coefficient: ``β``.
    """
    difference_BT = _kept(logprobs_BT.detach() - ref_logprobs_BT.detach(), mask_BT.bool())
    return rewards_B - kl_coefficient * difference_BT.sum(-1).to(rewards_B.dtype)


def _kept(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Zeros at masked positions; ``where`` also keeps their gradient from coming back as NaN, a product would not."""
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))
