"""What a forward pass keeps for its backward pass, counted from the layers of transformers' Qwen3-VL.

Counted are the tensors that autograd saves, with an attention that keeps no scores (flash kernels). Norms of the
language model compute in float32 and keep what they read in it.

Shapes: ``H`` hidden values, ``I`` values inside of a feed-forward layer, ``Q`` and ``K`` values of queries and of keys.
"""

from __future__ import annotations

from opensearch_lightning.models.shape import PolicyShape

_FLOAT32 = 4


def saved_bytes(shape: PolicyShape, *, tokens: int, patches: int, width: int, checkpointing: bool) -> float:
    """Bytes that layers of language model and vision tower keep at most.

    With checkpointing each layer keeps what it reads, and one layer at a time, computed again, keeps everything.

    Args:
        shape: of the policy.
        tokens: of the pass on one rank.
        patches: of its images.
        width: bytes of an activation.
        checkpointing: whether layers are computed again in the backward pass.
    """
    text = tokens * _text_layer(shape, width)
    vision = patches * _vision_layer(shape, width)
    outside = tokens * _norm(shape.hidden, width) + patches * (
        shape.vision.patch_values * width + _mergers(shape, width)
    )
    if not checkpointing:
        routed, dense = shape.routed_layers, shape.layers - shape.routed_layers
        layers = tokens * (dense * _dense_layer(shape, width) + routed * _routed_layer(shape, width))
        return layers + shape.vision.depth * vision + outside
    inputs = tokens * shape.layers * shape.hidden * width + patches * shape.vision.depth * shape.vision.hidden * width
    return inputs + max(text, vision) + outside


def _text_layer(shape: PolicyShape, width: int) -> int:
    """Bytes a token of the larger kind of layer."""
    kinds = [_routed_layer(shape, width)] if shape.routed_layers else []
    if shape.routed_layers < shape.layers:
        kinds.append(_dense_layer(shape, width))
    return max(kinds)


def _norm(values: int, width: int) -> int:
    """What it read in float32, the normalised, and what it wrote, which the next product keeps."""
    return values * (_FLOAT32 + 2 * width)


def _attention(shape: PolicyShape, width: int) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # the norms of queries and keys keep no output: turning by position keeps the angles alone
    turned = (queries + keys) * (_FLOAT32 + width)
    # queries, keys, values, and the result; a float32 a head for its softmax
    return _norm(shape.hidden, width) + turned + (2 * queries + 2 * keys) * width + _FLOAT32 * shape.heads


def _dense_layer(shape: PolicyShape, width: int) -> int:
    # gate, its activation, up, and their product
    return _attention(shape, width) + _norm(shape.hidden, width) + 4 * shape.intermediate * width


def _routed_layer(shape: PolicyShape, width: int) -> int:
    # each chosen expert: what it reads, gate and up, activation, product, and what it writes
    expert = 2 * shape.hidden + 4 * shape.moe_intermediate
    router = shape.experts * _FLOAT32
    return _attention(shape, width) + _norm(shape.hidden, width) + shape.experts_per_token * expert * width + router


def _vision_layer(shape: PolicyShape, width: int) -> int:
    vision = shape.vision
    # two norms read and write; queries and keys turned, and the product they came from, whose values are kept; what was
    # attended to, by image and put together; the feed-forward layer before and behind its activation
    return (11 * vision.hidden + 2 * vision.intermediate) * width


def _mergers(shape: PolicyShape, width: int) -> int:
    """Bytes a patch: norms read and write, the product before and behind its activation."""
    return (1 + shape.vision.deepstack) * 4 * shape.vision.hidden * width
