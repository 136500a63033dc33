"""Qwen3-VL policies: loading, scoring, and tiny ones to begin with."""

from opensearch_lightning.models.loading import load_policy, load_processor
from opensearch_lightning.models.policy import forbidden_token_ids, policy_logprobs
from opensearch_lightning.models.tiny import TinySizes, build_tiny_checkpoint, chat_template
from opensearch_lightning.models.weights import full_weights, is_sharded

__all__ = [
    "TinySizes",
    "build_tiny_checkpoint",
    "chat_template",
    "forbidden_token_ids",
    "full_weights",
    "is_sharded",
    "load_policy",
    "load_processor",
    "policy_logprobs",
]
