"""Rollouts: engines that sample tokens, and the agent loop that makes trajectories of them."""

from opensearch_lightning.rollout.agent_loop import AgentLoop, check_room
from opensearch_lightning.rollout.protocol import (
    EngineSession,
    EngineStats,
    FinishReason,
    Generation,
    Reward,
    RolloutEngine,
    SamplingParams,
    SessionKey,
)
from opensearch_lightning.rollout.transformers_engine import TransformersEngine

__all__ = [
    "AgentLoop",
    "EngineSession",
    "EngineStats",
    "FinishReason",
    "Generation",
    "Reward",
    "RolloutEngine",
    "SamplingParams",
    "SessionKey",
    "TransformersEngine",
    "check_room",
]
