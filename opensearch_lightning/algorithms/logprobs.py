"""Log-probabilities of chosen tokens, without ever holding those of the whole vocabulary for a whole batch.

Shapes: ``N`` positions, ``H`` hidden values, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opensearch_lightning.algorithms.tiled_logprobs import TiledLogprobs, TilePlan, impossible
from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What the distributions at ``N`` positions say; all of one shape.

    Attributes:
        logprobs: log-probability of the target; at least float32, with gradient.
        entropy: in nats, likewise; ``None`` where it was not asked for.
        greedy: int64 id of the likeliest token, the lowest of equals; ``None`` where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    greedy: Tensor | None


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
    """Log-probabilities and entropies (or ``None``) of :func:`token_scores`, which takes the same arguments.

    Raises:
        ConfigurationError: as :func:`token_scores`.
    """
    scores = token_scores(
        hidden_NH,
        weight_VH,
        targets_N,
        temperature,
        chunk_size,
        with_entropy=with_entropy,
        forbidden_ids=forbidden_ids,
        compute_dtype=compute_dtype,
        n_chunks=n_chunks,
    )
    return scores.logprobs, scores.entropy


def token_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor | Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 4096,
    *,
    with_entropy: bool = True,
    with_greedy: bool = False,
    forbidden_ids: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    n_chunks: int | None = None,
) -> TokenScores:
    """Log-probability of each target, entropy and likeliest token of each distribution, ``softmax(W·h / temperature)``.

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
        with_greedy: whether to name the likeliest token; the tiles are searched as they pass.
        forbidden_ids: int64 ids taken out of the distribution: their probability and the gradient of their logits are
            0. A target among them has a log-probability of about the smallest number of its type, not of minus
            infinity, so that a mask can still take it away.
        compute_dtype: type of the logits that a matrix makes, if not the widest of the inputs' types.
        n_chunks: chunks that a module is called with, some of them empty if need be; as few as ``chunk_size`` allows by
            default.

    Returns:
        The scores ``[N]``. They can be differentiated once.

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

        def head(hidden: Tensor, targets: Tensor) -> _Values:
            return _of_logits(weight_VH(hidden), targets, temperature, with_entropy, with_greedy, forbidden_ids)

        columns = _in_chunks(head, hidden_NH, targets_N, n_chunks or math.ceil(len(targets_N) / chunk_size))
        return TokenScores(logprobs=columns[0], entropy=columns[1], greedy=columns[2])
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
        with_greedy=with_greedy,
        forbidden=forbidden_ids,
    )
    logprobs_N, entropy_N, greedy_N = TiledLogprobs.apply(hidden_NH, weight_VH, targets_N, plan)
    return TokenScores(logprobs=logprobs_N, entropy=entropy_N, greedy=greedy_N)


def _check_ids(what: str, ids: Tensor, vocabulary: int) -> None:
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        raise ConfigurationError(
            f"{what} {int(ids[outside][0])} is not a row of an output matrix of {vocabulary} tokens: leave out "
            "positions without a target, and give the model and the tokenizer of one checkpoint"
        )


_Values = tuple[Tensor, Tensor | None, Tensor | None]


def _in_chunks(
    head: Callable[[Tensor, Tensor], _Values], hidden_NH: Tensor, targets_N: Tensor, n_chunks: int
) -> _Values:
    if n_chunks <= 1:
        return head(hidden_NH, targets_N)
    chunks = [
        checkpoint(head, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.tensor_split(n_chunks), targets_N.tensor_split(n_chunks), strict=True)
    ]
    logprobs, entropies, greedy = zip(*chunks, strict=True)
    return torch.cat(logprobs), _joined(entropies), _joined(greedy)


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _of_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float,
    with_entropy: bool,
    with_greedy: bool,
    forbidden_ids: Tensor | None,
) -> _Values:
    # Half-precision sums over a vocabulary lose the ratio of two policies: at least float32 from here on.
    scaled = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    if forbidden_ids is not None:
        scaled = scaled.index_fill(-1, forbidden_ids, impossible(scaled.dtype))
    top_N1, greedy_N1 = scaled.detach().max(-1, keepdim=True)
    # Less the largest: the logarithm of a sure token is the small difference of two large numbers.
    scaled = scaled - top_N1
    normalizer_N = scaled.logsumexp(-1)
    logprobs_N = scaled.gather(-1, targets_N[:, None]).squeeze(-1) - normalizer_N
    greedy_N = greedy_N1.squeeze(-1) if with_greedy else None
    if not with_entropy:
        return logprobs_N, None, greedy_N
    mean_logit_N = ((scaled - normalizer_N[:, None]).exp() * scaled).sum(-1)
    return logprobs_N, normalizer_N - mean_logit_N, greedy_N
