"""Attention inside the segments of a packed row, as an attention implementation of transformers.

No mask over the whole row is ever built: time and memory grow with the segments, not with the square of the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from opensearch_lightning.chat.packing import Segment
from opensearch_lightning.errors import ConfigurationError

SEGMENTED_SDPA = "segmented_sdpa"
"""Name of the implementation: transformers' ``"sdpa"``, but by segment where a call brings ``segments``."""

FLASH = "flash_attention_2"

SEGMENTED_FLASH = "segmented_flash_attention_2"
"""Likewise of transformers' ``"flash_attention_2"``."""


def attend_by_segment(model: Any) -> None:
    """Let the text layers of ``model`` take ``segments``; the vision tower keeps its attention.

    Without segments they attend as before, so that padded batches and a sampling engine see no difference, and the
    switch needs no way back. That also holds for layers computed again in the backward pass (gradient checkpointing).

    Args:
        model: a ``Qwen3VLForConditionalGeneration``.

    Raises:
        ConfigurationError: if the text layers attend by another implementation than ``"sdpa"`` or
            ``"flash_attention_2"``.
    """
    config, by_segment = model.config.text_config, {"sdpa": SEGMENTED_SDPA, FLASH: SEGMENTED_FLASH}
    if config._attn_implementation in by_segment.values():
        return
    if config._attn_implementation not in by_segment:
        raise ConfigurationError(
            f"the policy's attention is {config._attn_implementation!r}, which takes no packed rows; load it with "
            f'attn_implementation="sdpa" (on a GPU that runs flash kernels too) or "{FLASH}"'
        )
    config._attn_implementation = by_segment[config._attn_implementation]


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


def segmented_flash_attention(
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
    """As :func:`segmented_attention`, with one call of the flash-attn kernel for all segments of a row.

    The kernel knows where segments begin, not which one continues which: with parents, or with ``exchange``,
    :func:`segmented_attention` does the work.
    """
    if exchange is not None or any(segment.parent >= 0 for segment in segments or ()):
        return segmented_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            segments=segments,
            exchange=exchange,
            dropout=dropout,
            scaling=scaling,
        )
    bounds = {} if segments is None else _bounds(tuple(segments), query.device)
    attended: Tensor = _flash_attention_forward(
        *(states.transpose(1, 2) for states in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        target_dtype=get_target_dtype(query, module),
        attn_implementation=FLASH,
        **{**options, **bounds},
    )
    return attended, None


# asked for in each layer of a pass
@functools.lru_cache(maxsize=8)
def _bounds(segments: tuple[Segment, ...], device: torch.device) -> dict[str, Any]:
    """Where segments begin and end, and the longest, as transformers hands them to the kernel."""
    lengths = [segment.length for segment in segments]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


AttentionInterface.register(SEGMENTED_SDPA, segmented_attention)
AttentionMaskInterface.register(SEGMENTED_SDPA, sdpa_mask)
AttentionInterface.register(SEGMENTED_FLASH, segmented_flash_attention)
AttentionMaskInterface.register(SEGMENTED_FLASH, flash_attention_mask)
