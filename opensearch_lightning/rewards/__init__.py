"""Rewards: format, accuracy, search quality, their composition, and the embedded judges."""

from opensearch_lightning.rewards.composite import AccuracyJudge, CompositeReward, QueryJudge
from opensearch_lightning.rewards.exact_match import ExactMatchJudge, normalize_answer
from opensearch_lightning.rewards.form import format_reward
from opensearch_lightning.rewards.parsing import parse_score, parse_verdict
from opensearch_lightning.rewards.queries import LexicalQueryJudge, QueryQuality, Search, searches

__all__ = [
    "AccuracyJudge",
    "CompositeReward",
    "ExactMatchJudge",
    "LexicalQueryJudge",
    "QueryJudge",
    "QueryQuality",
    "Search",
    "format_reward",
    "normalize_answer",
    "parse_score",
    "parse_verdict",
    "searches",
]
