"""Qwen3-VL conversations: rendering to tokens, reading actions, positions and batches."""

from opensearch_lightning.chat.actions import CallLike, format_action, parse_action
from opensearch_lightning.chat.collate import ModelBatch, TokenSequence, collate
from opensearch_lightning.chat.cutting import cut_at_turn
from opensearch_lightning.chat.images import ImageSource
from opensearch_lightning.chat.packing import PackedBatch, Segment, pack, plan_packs
from opensearch_lightning.chat.positions import mrope_positions
from opensearch_lightning.chat.records import (
    AssistantTurn,
    ObservationTurn,
    Part,
    Rendered,
    TokenizedSample,
    Turn,
    UserTurn,
)
from opensearch_lightning.chat.renderer import ChatRenderer, ControlStringError
from opensearch_lightning.chat.sft_batch import SFTBatch

__all__ = [
    "AssistantTurn",
    "CallLike",
    "ChatRenderer",
    "ControlStringError",
    "ImageSource",
    "ModelBatch",
    "ObservationTurn",
    "PackedBatch",
    "Part",
    "Rendered",
    "SFTBatch",
    "Segment",
    "TokenSequence",
    "TokenizedSample",
    "Turn",
    "UserTurn",
    "collate",
    "cut_at_turn",
    "format_action",
    "mrope_positions",
    "pack",
    "parse_action",
    "plan_packs",
]
