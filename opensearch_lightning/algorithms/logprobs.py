"""Log-probabilities of chosen tokens, without ever holding those of the whole vocabulary for a whole batch.

Shapes: ``N`` positions, ``H`` hidden values, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opensearch_lightning.algorithms.tiled_logprobs import TiledLogprobs, TilePlan, impossible
from opensearch_lightning.errors import ConfigurationError


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor | Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 4096,
    *,
    with_entropy: bool = True,
    forbidden_ids: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    n_chunks: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and entropy of each distribution, ``softmax(W·h / temperature)``.

    With a matrix, logits are computed in tiles, in at least float32 and outside of autocast, and once more for the
    gradients, which are accumulated in the same type and returned in that of the inputs. With a module, positions are
    taken in chunks; of more than one chunk, each is computed again for its backward pass.

    Args:
        hidden_NH: last hidden states, any floating type.
        weight_VH: output matrix, or the module that applies it (a sharded module must be called to be gathered, and a
            module may compute in a type of its own).
        targets_N: int64 ids.
        temperature: divides the logits; that of sampling, for the distribution that was sampled from.
        chunk_size: most positions at a time: at most ``[chunk_size, V]`` logits are held.
        with_entropy: whether to compute the entropy, in nats.
        forbidden_ids: int64 ids taken out of the distribution: their probability and the gradient of their logits are
            0. A target among them has a log-probability of about the smallest number of its type, not of minus
            infinity, so that a mask can still take it away.
        compute_dtype: type of the logits that a matrix makes, if not the widest of the inputs' types.
        n_chunks: chunks that a module is called with, some of them empty if need be; as few as ``chunk_size`` allows by
            default.

    Returns:
        ``[N]`` log-probabilities, and ``[N]`` entropies or ``None``; at least float32, with gradient. They can be
        differentiated once.

    Raises:
        ConfigurationError: if the temperature or the chunk size is not positive and finite, or, with a matrix, a target
            or a forbidden id is not one of its rows.
    """
    if not 0 < temperature < math.inf or chunk_size < 1:
        raise ConfigurationError(
            f"temperature={temperature} and chunk_size={chunk_size} must be positive and finite; greedy decoding has "
            "no distribution to train on, use temperature=1.0"
        )
    if not isinstance(weight_VH, Tensor):

        def head(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            return _of_logits(weight_VH(hidden), targets, temperature, with_entropy, forbidden_ids)

        return _in_chunks(head, hidden_NH, targets_N, n_chunks or math.ceil(len(targets_N) / chunk_size))
    _check_ids("target", targets_N, len(weight_VH))
    if forbidden_ids is not None:
        _check_ids("forbidden id", forbidden_ids, len(weight_VH))
    inputs_dtype = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    plan = TilePlan.for_device(
        hidden_NH.device,
        temperature=temperature,
        chunk_size=chunk_size,
        dtype=torch.promote_types(compute_dtype or inputs_dtype, torch.float32),
        with_entropy=with_entropy,
        forbidden=forbidden_ids,
    )
    return TiledLogprobs.apply(hidden_NH, weight_VH, targets_N, plan)


def _check_ids(what: str, ids: Tensor, vocabulary: int) -> None:
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        raise ConfigurationError(
            f"{what} {int(ids[outside][0])} is not a row of an output matrix of {vocabulary} tokens: leave out "
            "positions without a target, and give the model and the tokenizer of one checkpoint"
        )


def _in_chunks(
    head: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]], hidden_NH: Tensor, targets_N: Tensor, n_chunks: int
) -> tuple[Tensor, Tensor | None]:
    if n_chunks <= 1:
        return head(hidden_NH, targets_N)
    chunks = [
        checkpoint(head, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), None if entropies[0] is None else torch.cat(entropies)


def _of_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool, forbidden_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    # Half-precision sums over a vocabulary lose the ratio of two policies: at least float32 from here on.
    scaled = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    if forbidden_ids is not None:
        scaled = scaled.index_fill(-1, forbidden_ids, impossible(scaled.dtype))
    # Less the largest: the logarithm of a sure token is the small difference of two large numbers.
    scaled = scaled - scaled.detach().amax(-1, keepdim=True)
    normalizer_N = scaled.logsumexp(-1)
    logprobs_N = scaled.gather(-1, targets_N[:, None]).squeeze(-1) - normalizer_N
    if not with_entropy:
        return logprobs_N, None
    mean_logit_N = ((scaled - normalizer_N[:, None]).exp() * scaled).sum(-1)
    return logprobs_N, normalizer_N - mean_logit_N
