"""The recipe's equations as pure functions on tensors: fatal steps, masks, advantages, losses, log-probabilities."""

from opensearch_lightning.algorithms.advantages import (
    Baseline,
    Estimator,
    clamp_bias,
    clamp_fatal_advantages,
    group_advantages,
)
from opensearch_lightning.algorithms.fatal import Onset, fatal_loss_mask, find_fatal_step
from opensearch_lightning.algorithms.logprobs import TokenScores, token_logprobs, token_scores
from opensearch_lightning.algorithms.losses import (
    Aggregation,
    PolicyLoss,
    aggregate,
    kl_penalized_rewards,
    low_variance_kl,
    policy_loss,
)
from opensearch_lightning.algorithms.mismatch import Mismatch, mismatch, truncated_importance_weights

__all__ = [
    "Aggregation",
    "Baseline",
    "Estimator",
    "Mismatch",
    "Onset",
    "PolicyLoss",
    "TokenScores",
    "aggregate",
    "clamp_bias",
    "clamp_fatal_advantages",
    "fatal_loss_mask",
    "find_fatal_step",
    "group_advantages",
    "kl_penalized_rewards",
    "low_variance_kl",
    "mismatch",
    "policy_loss",
    "token_logprobs",
    "token_scores",
    "truncated_importance_weights",
]
