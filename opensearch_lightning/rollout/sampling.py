"""Draws one token for each row, by inverting the cumulative distribution at keyed noise.

Shapes: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits_NV: Tensor, uniforms_N: Tensor, temperature_N: Tensor, top_p_N: Tensor, top_k_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample ids and the log-probabilities of the distribution that they were drawn from.

    Args:
        logits_NV: float32 or float64, forbidden tokens at ``-inf``.
        uniforms_N: noise in [0, 1), float64.
        temperature_N: 0 takes the most likely token; its log-probability is that at temperature 1.
        top_p_N: nucleus mass, 1 for off.
        top_k_N: 0 for off.

    Returns:
        ``(token_ids_N, logprobs_N)``.
    """
    greedy_N = temperature_N == 0
    scaled_NV = logits_NV / torch.where(greedy_N, 1.0, temperature_N)[:, None]
    if bool((top_k_N > 0).any()) or bool((top_p_N < 1).any()):
        scaled_NV = _truncate(scaled_NV, top_p_N, top_k_N)
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    cumulative_NV = logprobs_NV.double().exp().cumsum(dim=-1)
    target_N1 = (uniforms_N * cumulative_NV[:, -1])[:, None]
    # right=True steps over tokens of probability zero
    drawn_N = torch.searchsorted(cumulative_NV, target_N1, right=True).squeeze(1).clamp_(max=logits_NV.shape[1] - 1)
    token_ids_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), drawn_N)
    return token_ids_N, logprobs_NV.gather(1, token_ids_N[:, None]).squeeze(1)


def _truncate(scaled_NV: Tensor, top_p_N: Tensor, top_k_N: Tensor) -> Tensor:
    """Put what top-k and then top-p leave out at ``-inf``."""
    ordered_NV, index_NV = scaled_NV.sort(dim=-1, descending=True)
    rank_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    limit_N = torch.where(top_k_N > 0, top_k_N, scaled_NV.shape[1])
    ordered_NV = ordered_NV.masked_fill(rank_V >= limit_N[:, None], float("-inf"))
    probability_NV = ordered_NV.softmax(dim=-1)
    # the token that crosses the mass is kept; with top_p = 1 rounding must not cut the tail
    before_NV = probability_NV.cumsum(dim=-1) - probability_NV
    cut_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
    return torch.empty_like(scaled_NV).scatter_(1, index_NV, ordered_NV.masked_fill(cut_NV, float("-inf")))
