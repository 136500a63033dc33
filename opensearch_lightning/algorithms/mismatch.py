"""What lies between the engine that sampled and the trainer that scores the same tokens.

Shapes: ``B`` trajectories, ``T`` tokens. Whatever stands at masked positions, NaN included, reaches no result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Sums and extremes over the kept tokens, so that parts of a batch can be put together. All are scalars."""

    n_tokens: Tensor
    absolute: Tensor
    """Sum of ``|log π_trainer − log π_engine|``."""
    largest: Tensor
    """Largest of them."""
    kl: Tensor
    """Sum of the low-variance estimate of ``KL(π_engine ‖ π_trainer)`` at each token."""


def mismatch(old_logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, mask_BT: Tensor) -> Mismatch:
    """How far the trainer's log-probabilities lie from the engine's, for the same weights or for newer ones.

    Args:
        old_logprobs_BT: of the trainer's policy before the update.
        sampling_logprobs_BT: of the engine, when it sampled.
        mask_BT: bool, kept tokens.
    """
    difference_BT = torch.where(mask_BT, old_logprobs_BT - sampling_logprobs_BT, 0.0)
    return Mismatch(
        n_tokens=mask_BT.sum(),
        absolute=difference_BT.abs().sum(),
        largest=difference_BT.abs().max() if mask_BT.numel() else difference_BT.new_zeros(()),
        kl=(difference_BT.exp() - difference_BT - 1).sum(),
    )


def truncated_importance_weights(
    old_logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, mask_BT: Tensor, cap: float
) -> Tensor:
    """``min(π_trainer/π_engine, cap)`` at each kept token, 0 elsewhere; no gradient.

    Multiplied with the loss of a token, it makes up for tokens that were drawn from another distribution than the one
    that is trained: an engine of other numerics, or older weights. Truncated importance sampling (Ionides, 2008), as
    used for this between rollout engines and trainers.

    Args:
        old_logprobs_BT: of the trainer's policy before the update.
        sampling_logprobs_BT: of the engine, when it sampled.
        mask_BT: bool, kept tokens.
        cap: largest weight, at least 1.

    Raises:
        ConfigurationError: if the cap is below 1, which would scale down tokens that need no correction.
    """
    if not cap >= 1:
        raise ConfigurationError(f"importance cap={cap} must be at least 1; 2 is common")
    ratio_BT = torch.where(mask_BT, old_logprobs_BT.detach() - sampling_logprobs_BT.detach(), 0.0).exp()
    return torch.where(mask_BT, ratio_BT.clamp(max=cap), 0.0)
