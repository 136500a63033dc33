"""Attention inside the segments of a packed row, as an attention implementation of transformers.

No mask over the whole row is ever built: time and memory grow with the segments, not with the square of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from opensearch_lightning.chat.packing import Segment
from opensearch_lightning.errors import ConfigurationError

SEGMENTED_SDPA = "segmented_sdpa"
"""Name of the implementation: transformers' ``"sdpa"``, but by segment where a call brings ``segments``."""


def attend_by_segment(model: Any) -> None:
    """Let the text layers of ``model`` take ``segments``; the vision tower keeps its attention.

    Without segments they attend as before, so that padded batches and a sampling engine see no difference, and the
    switch needs no way back. That also holds for layers computed again in the backward pass (gradient checkpointing).

    Args:
        model: a ``Qwen3VLForConditionalGeneration``.

    Raises:
        ConfigurationError: if the text layers attend by another implementation than ``"sdpa"``.
    """
    config = model.config.text_config
    if config._attn_implementation == SEGMENTED_SDPA:
        return
    if config._attn_implementation != "sdpa":
        raise ConfigurationError(
            f"the policy's attention is {config._attn_implementation!r}, which takes no packed rows; load it with "
            'attn_implementation="sdpa" (on a GPU that runs flash kernels too)'
        )
    config._attn_implementation = SEGMENTED_SDPA


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    exchange: Callable[..., tuple[Tensor, None]] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each segment over its parent and itself.

    Args:
        module: the attention layer.
        query: ``[1, heads, N, D]``, turned by its positions.
        key: ``[1, kv_heads, N, D]``, turned likewise.
        value: ``[1, kv_heads, N, D]``.
        attention_mask: of transformers; ``None`` with segments.
        segments: the stretches of the row, without gaps; ``None`` for transformers' own ``"sdpa"``.
        exchange: attends in this function's place where each rank holds a stretch of the row
            (:class:`~opensearch_lightning.models.SequenceParallel`).
        dropout: probability.
        scaling: factor of the scores; ``None`` for ``1/√D``.
        options: of transformers' ``"sdpa"``.

    Returns:
        ``[1, N, heads, D]``, and ``None`` for the weights.
    """
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if exchange is not None:
        return exchange(query, key, value, segments=segments, dropout=dropout, scaling=scaling)
    # split once: the gradients of as many slices would each be as large as the row
    lengths = [segment.length for segment in segments]
    queries, keys, values = (states.split(lengths, dim=2) for states in (query, key, value))
    outputs = []
    for number, segment in enumerate(segments):
        key_states, value_states = keys[number], values[number]
        if segment.parent >= 0:
            key_states = torch.cat([keys[segment.parent], key_states], dim=2)
            value_states = torch.cat([values[segment.parent], value_states], dim=2)
        output = scaled_dot_product_attention(
            queries[number],
            key_states,
            value_states,
            # plainly causal where there is no parent; with one, the last token sees everything
            attn_mask=causal_lower_right(segment.length, key_states.shape[2]),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(SEGMENTED_SDPA, segmented_attention)
AttentionMaskInterface.register(SEGMENTED_SDPA, sdpa_mask)
