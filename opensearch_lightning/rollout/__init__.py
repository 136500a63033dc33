"""Rollouts: engines that sample tokens, and the agent loop that makes trajectories of them."""

from opensearch_lightning.rollout.agent_loop import AgentLoop, IncompleteGroups, check_room
from opensearch_lightning.rollout.asynchronous import AsyncRollouts
from opensearch_lightning.rollout.ledger import TaskLedger
from opensearch_lightning.rollout.prompt import Prompt, PromptTokens
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
from opensearch_lightning.rollout.replay_buffer import OnStale, PendingGroup, ReplayBuffer, Taken
from opensearch_lightning.rollout.transformers_engine import TransformersEngine

__all__ = [
    "AgentLoop",
    "AsyncRollouts",
    "EngineSession",
    "EngineStats",
    "FinishReason",
    "Generation",
    "IncompleteGroups",
    "OnStale",
    "PendingGroup",
    "Prompt",
    "PromptTokens",
    "ReplayBuffer",
    "Reward",
    "RolloutEngine",
    "SamplingParams",
    "SessionKey",
    "Taken",
    "TaskLedger",
    "TransformersEngine",
    "check_room",
]
