"""The recipe's equations as pure functions on tensors: fatal steps, masks, advantages, losses, log-probabilities."""

from opensearch_lightning.algorithms.advantages import (
    Estimator,
    clamp_bias,
    clamp_fatal_advantages,
    group_advantages,
)
from opensearch_lightning.algorithms.fatal import Onset, fatal_loss_mask, find_fatal_step
from opensearch_lightning.algorithms.logprobs import token_logprobs
from opensearch_lightning.algorithms.losses import (
    Aggregation,
    PolicyLoss,
    aggregate,
    low_variance_kl,
    policy_loss,
)

__all__ = [
    "Aggregation",
    "Estimator",
    "Onset",
    "PolicyLoss",
    "aggregate",
    "clamp_bias",
    "clamp_fatal_advantages",
    "fatal_loss_mask",
    "find_fatal_step",
    "group_advantages",
    "low_variance_kl",
    "policy_loss",
    "token_logprobs",
]
