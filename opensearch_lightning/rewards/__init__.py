"""Rewards: format, accuracy, search quality, their composition, the embedded judges and those that ask a model."""

from opensearch_lightning.rewards.chat_accuracy import ChatAccuracyJudge
from opensearch_lightning.rewards.chat_judge import ChatJudge
from opensearch_lightning.rewards.chat_model import ChatModel
from opensearch_lightning.rewards.chat_queries import ChatQueryJudge
from opensearch_lightning.rewards.chat_visual import ChatVisualActionJudge
from opensearch_lightning.rewards.composite import AccuracyJudge, CompositeReward, QueryJudge, judge_name
from opensearch_lightning.rewards.exact_match import ExactMatchJudge, normalize_answer
from opensearch_lightning.rewards.failure_limit import FailureLimit
from opensearch_lightning.rewards.form import format_reward
from opensearch_lightning.rewards.judge_metrics import JudgeFailure, JudgeMetrics, TokenPrice
from opensearch_lightning.rewards.parsing import parse_score, parse_verdict
from opensearch_lightning.rewards.queries import LexicalQueryJudge, QueryQuality, Search, searches
from opensearch_lightning.rewards.visual_actions import VisualAction, visual_actions

__all__ = [
    "AccuracyJudge",
    "ChatAccuracyJudge",
    "ChatJudge",
    "ChatModel",
    "ChatQueryJudge",
    "ChatVisualActionJudge",
    "CompositeReward",
    "ExactMatchJudge",
    "FailureLimit",
    "JudgeFailure",
    "JudgeMetrics",
    "LexicalQueryJudge",
    "QueryJudge",
    "QueryQuality",
    "Search",
    "TokenPrice",
    "VisualAction",
    "format_reward",
    "judge_name",
    "normalize_answer",
    "parse_score",
    "parse_verdict",
    "searches",
    "visual_actions",
]
