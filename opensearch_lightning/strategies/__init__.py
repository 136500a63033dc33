"""Training on several ranks that share weights and optimizer: DeepSpeed's ZeRO-2 and ZeRO-3."""

from opensearch_lightning.strategies.checkpoints import (
    ShardedLayout,
    check_continues,
    consolidated_weights,
    read_layout,
    saved_names,
)
from opensearch_lightning.strategies.zero import ZeroStrategy, is_deepspeed, prepare_engine, zero_stage

__all__ = [
    "ShardedLayout",
    "ZeroStrategy",
    "check_continues",
    "consolidated_weights",
    "is_deepspeed",
    "prepare_engine",
    "read_layout",
    "saved_names",
    "zero_stage",
]
