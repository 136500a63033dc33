"""A policy's output layer: in a type of its own, and from last hidden states to log-probabilities.

Shapes: ``N`` positions, ``H`` hidden values, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from opensearch_lightning.algorithms.logprobs import TokenScores, token_scores


class OutputLayer(nn.Linear):
    """An output layer that computes in another type than its weight, which it shares with ``layer``."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.compute_dtype = dtype

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits in ``compute_dtype``."""
        # autocast would take the precision away again, and the engine runs outside of it
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(self.compute_dtype), self.weight.to(self.compute_dtype))


def output_layer_scores(
    layer: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    with_greedy: bool = False,
    forbidden_ids: Tensor | None = None,
    n_chunks: int | None = None,
) -> TokenScores:
    """:func:`~opensearch_lightning.algorithms.token_scores` of an output layer, by the quicker way that it allows.

    A plain linear layer is its matrix, and needs no logits but a tile's. Any other layer is called: one whose matrix is
    sharded (ZeRO-3, FSDP), which gathers it only then; one with hooks, which want to see the logits; one with a bias
    or an adapter.

    Args:
        layer: output layer, as ``model.lm_head``.
        hidden_NH: last hidden states ``[N, H]``.
        targets_N: int64 ids ``[N]``.
        temperature: divides the logits.
        chunk_size: most positions at a time.
        with_entropy: whether to compute the entropy, in nats.
        with_greedy: whether to name the likeliest token.
        forbidden_ids: int64 ids taken out of the distribution.
        n_chunks: how often a layer that is called is called, as for ``token_scores``.

    Returns:
        The scores ``[N]``.

    Raises:
        ConfigurationError: as ``token_scores``.
    """
    weight_VH = _matrix(layer)
    return token_scores(
        hidden_NH,
        layer if weight_VH is None else weight_VH,
        targets_N,
        temperature,
        chunk_size,
        with_entropy=with_entropy,
        with_greedy=with_greedy,
        forbidden_ids=forbidden_ids,
        n_chunks=n_chunks,
        compute_dtype=layer.compute_dtype if isinstance(layer, OutputLayer) else None,
    )


def _matrix(layer: nn.Module) -> Tensor | None:
    """The matrix that is all there is to ``layer``, or ``None``."""
    # By type, not by isinstance: adapters and quantised layers are subclasses that compute something else.
    if type(layer) not in (nn.Linear, OutputLayer) or layer.bias is not None or _has_hooks(layer):
        return None
    weight = layer.weight
    whole = tuple(weight.shape) == (layer.out_features, layer.in_features)
    sharded = hasattr(weight, "ds_id") or type(weight) not in (nn.Parameter, torch.Tensor)
    return weight if whole and not sharded else None


def _has_hooks(layer: nn.Module) -> bool:
    return any(
        (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks),
    )
