"""Which parts of a policy are trained, told by its parameters."""

from __future__ import annotations

from typing import Any

from opensearch_lightning.models.adapters import is_adapter


def frozen_parts(policy: Any) -> frozenset[str]:
    """Of :data:`~opensearch_lightning.models.shape.PARTS`, those of ``policy`` that get no gradient.

    Adapters are small beside what they are put on, and do not count.
    """
    named = [(name, weight) for name, weight in policy.named_parameters() if not is_adapter(name)]
    trained = {_part(name) for name, weight in named if weight.requires_grad}
    every = {_part(name) for name, _ in named}
    # tied to the embedding, it has no name of its own
    if not policy.get_output_embeddings().weight.requires_grad:
        every.add("output_layer")
    else:
        trained.add("output_layer")
    return frozenset(every - trained)


def _part(name: str) -> str:
    """The part that a parameter of this name belongs to."""
    if ".visual." in name:
        return "projector" if "merger" in name else "vision_tower"
    marks = {
        "embed_tokens": "embedding",
        "lm_head": "output_layer",
        "norm": "norms",
        ".self_attn.": "attention",
        ".experts.": "experts",
        ".mlp.gate.": "router",
        ".mlp.": "mlp",
    }
    return next(part for mark, part in marks.items() if mark in name)
