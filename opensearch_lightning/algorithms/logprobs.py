"""Log-probabilities of chosen tokens, without ever holding those of the whole vocabulary for a whole batch.

Shapes: ``N`` positions, ``H`` hidden values, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from opensearch_lightning.errors import ConfigurationError


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor | Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 4096,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and entropy of each distribution, ``softmax(W·h / temperature)``.

    Positions are taken in chunks. With more than one chunk, each is computed again for its backward pass, so that at
    no time more than ``[chunk_size, V]`` is held.

    Args:
        hidden_NH: last hidden states, any floating type.
        weight_VH: output matrix, or the module that applies it (a sharded module must be called to be gathered).
        targets_N: int64 ids.
        temperature: divides the logits; that of sampling, for the distribution that was sampled from.
        chunk_size: most positions at a time.
        with_entropy: whether to compute the entropy, in nats.

    Returns:
        ``[N]`` log-probabilities, and ``[N]`` entropies or ``None``; at least float32, with gradient.

    Raises:
        ConfigurationError: if the temperature or the chunk size is not positive.
    """
    if temperature <= 0 or chunk_size < 1:
        raise ConfigurationError(
            f"temperature={temperature} and chunk_size={chunk_size} must be positive; greedy decoding has no "
            "distribution to train on, use temperature=1.0"
        )

    def head(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = weight_VH(hidden) if callable(weight_VH) else linear(hidden, weight_VH)
        return _of_logits(logits, targets, temperature, with_entropy)

    if len(targets_N) <= chunk_size:
        return head(hidden_NH, targets_N)
    chunks = [
        checkpoint(head, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(chunk_size), targets_N.split(chunk_size), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _of_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    # Half-precision sums over a vocabulary lose the ratio of two policies: at least float32 from here on.
    scaled = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    # Less the largest: the logarithm of a sure token is the small difference of two large numbers.
    scaled = scaled - scaled.detach().amax(-1, keepdim=True)
    normalizer_N = scaled.logsumexp(-1)
    logprobs_N = scaled.gather(-1, targets_N[:, None]).squeeze(-1) - normalizer_N
    if not with_entropy:
        return logprobs_N, None
    mean_logit_N = ((scaled - normalizer_N[:, None]).exp() * scaled).sum(-1)
    return logprobs_N, normalizer_N - mean_logit_N
