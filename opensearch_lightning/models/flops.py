"""Floating-point operations that a model needs, from its dimensions; a multiplication and an addition count as two.

What a model needs, not what a machine does: attention between tokens that do not see each other counts for nothing,
and so does computing layers again in the backward pass. That is the convention of model FLOPs utilization (PaLM, arXiv
2204.02311, appendix B). Norms, activations, positions and the softmax, which are no matrix products, are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opensearch_lightning.models.shape import PolicyShape


def forward_flops(shape: PolicyShape, *, lengths: Sequence[int], supervised: int, patches: Sequence[int]) -> float:
    """Operations of one forward pass.

    Args:
        shape: of the policy.
        lengths: tokens of each document, image tokens counted; documents do not attend to each other.
        supervised: positions that pass through the output layer.
        patches: of each image, before they are merged to tokens.
    """
    return sum(forward_flops_by_part(shape, lengths=lengths, supervised=supervised, patches=patches).values())


def training_flops(
    shape: PolicyShape,
    *,
    lengths: Sequence[int],
    supervised: int,
    patches: Sequence[int],
    frozen: Collection[str] = (),
) -> float:
    """Operations of one forward and backward pass.

    The backward pass of a layer makes two matrix products for each of the forward pass: the gradient of what it read,
    and that of its weights.

    Args:
        shape: of the policy.
        lengths: as for :func:`forward_flops`.
        supervised: as for :func:`forward_flops`.
        patches: as for :func:`forward_flops`.
        frozen: of :data:`~opensearch_lightning.models.shape.PARTS`, those whose weights get no gradient. Nothing is
            passed back into a frozen vision tower.
    """
    forward = forward_flops_by_part(shape, lengths=lengths, supervised=supervised, patches=patches)
    return sum(flops * _passes(part, frozen) for part, flops in forward.items())


def forward_flops_by_part(
    shape: PolicyShape, *, lengths: Sequence[int], supervised: int, patches: Sequence[int]
) -> dict[str, float]:
    """:func:`forward_flops` by part of the policy; ``attended`` is what queries, keys and values do together."""
    tokens = sum(lengths)
    flops = dict.fromkeys(("attention", "mlp", "vision_tower", "projector"), 0.0)
    for linears in shape.linears():
        flops[linears.part] += linears.flops * tokens
    flops["experts"] = 2.0 * shape.routed_layers * shape.experts_per_token * shape.expert_parameters * tokens
    flops["router"] = 2.0 * shape.routed_layers * shape.experts * shape.hidden * tokens
    flops["output_layer"] = 2.0 * shape.hidden * shape.vocabulary * supervised
    # two products of 2 · length² · width each, half of it behind the causal mask
    flops["attended"] = 2.0 * shape.layers * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    vision, all_patches = shape.vision, sum(patches)
    for linears in (vision.patch_embedding(), *vision.linears()):
        rows = all_patches if linears.part == "vision_tower" else all_patches / vision.merge**2
        flops[linears.part] += linears.flops * rows
    flops["attended_patches"] = 4.0 * vision.depth * vision.hidden * sum(count**2 for count in patches)
    return flops


def _passes(part: str, frozen: Collection[str]) -> int:
    """Matrix products of forward and backward pass for one of the forward pass."""
    blind = "vision_tower" in frozen
    if part in ("vision_tower", "attended_patches"):
        return 1 if blind else 3
    if part == "projector" and part in frozen:
        return 1 if blind else 2
    return 2 if part in frozen else 3
