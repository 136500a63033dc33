"""Qwen3-VL policies: loading, adapters, scoring, their dimensions and arithmetic, and tiny ones to begin with."""

from opensearch_lightning.models.adapters import Lora, adapter_alpha, add_lora, has_adapters, is_adapter, merge_adapters
from opensearch_lightning.models.flops import forward_flops, training_flops
from opensearch_lightning.models.frozen import frozen_parts
from opensearch_lightning.models.loading import load_policy, load_processor
from opensearch_lightning.models.output_layer import output_layer_scores
from opensearch_lightning.models.policy import forbidden_token_ids, policy_logprobs, policy_scores
from opensearch_lightning.models.router import (
    RouterLosses,
    check_routers,
    collect_router_logits,
    float32_router,
    router_losses,
)
from opensearch_lightning.models.sequence_parallel import SequenceParallel
from opensearch_lightning.models.shape import PolicyShape, VisionShape
from opensearch_lightning.models.tiny import TinySizes, build_tiny_checkpoint, chat_template
from opensearch_lightning.models.weights import full_weights, is_sharded

__all__ = [
    "Lora",
    "PolicyShape",
    "RouterLosses",
    "SequenceParallel",
    "TinySizes",
    "VisionShape",
    "adapter_alpha",
    "add_lora",
    "build_tiny_checkpoint",
    "chat_template",
    "check_routers",
    "collect_router_logits",
    "float32_router",
    "forbidden_token_ids",
    "forward_flops",
    "frozen_parts",
    "full_weights",
    "has_adapters",
    "is_adapter",
    "is_sharded",
    "load_policy",
    "load_processor",
    "merge_adapters",
    "output_layer_scores",
    "policy_logprobs",
    "policy_scores",
    "router_losses",
    "training_flops",
]
