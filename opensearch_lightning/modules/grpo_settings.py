"""Which settings of GRPO can work together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from opensearch_lightning.algorithms import Aggregation, Baseline, Estimator
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import check_routers

if TYPE_CHECKING:
    from opensearch_lightning.modules.grpo import FatalAwareGRPO

KLPlace = Literal["loss", "reward"]
"""Where the divergence from a reference is taken."""

OldLogprobs = Literal["sampling", "policy"]
"""Whose log-probabilities are the denominator of the ratio: the engine's, or the policy's before the update."""

CHOICES: dict[str, Any] = {
    "advantage": Estimator,
    "baseline": Baseline,
    "aggregation": Aggregation,
    "kl_in": KLPlace,
    "old_logprobs": OldLogprobs,
}
WEIGHTS = ("kl_coefficient", "entropy_coefficient", "router_aux_coefficient", "router_z_coefficient")


def check_settings(module: FatalAwareGRPO) -> None:
    """See that the settings of ``module`` can work, each alone and together.

    Raises:
        ConfigurationError: one cannot; the message has its name, its value and what to set.
    """
    for name, choices in CHOICES.items():
        if (value := getattr(module, name)) not in get_args(choices):
            raise ConfigurationError(f"{name} is {value!r}; set one of {', '.join(get_args(choices))}")
    for name in WEIGHTS:
        if not 0 <= (value := getattr(module, name)) < math.inf:
            raise ConfigurationError(f"{name} is {value}; set 0 (off) or more")
    if module.mini_batch_prompts is not None and module.mini_batch_prompts < 1:
        raise ConfigurationError(f"mini_batch_prompts is {module.mini_batch_prompts}; set at least 1, or null for all")
    if module.max_tokens_per_micro_batch < 1:
        raise ConfigurationError(f"max_tokens_per_micro_batch is {module.max_tokens_per_micro_batch}; set at least 1")
    if module.max_grad_norm is not None and not module.max_grad_norm > 0:
        raise ConfigurationError(f"max_grad_norm is {module.max_grad_norm}; set a norm above 0, or null for no limit")
    if module.kl_coefficient and module.reference is None:
        raise ConfigurationError(
            f"kl_coefficient is {module.kl_coefficient}, and there is no reference; give one, or set 0"
        )
    if module.importance_cap is not None and module.old_logprobs != "policy":
        raise ConfigurationError(
            f'importance_cap is {module.importance_cap}, but old_logprobs="{module.old_logprobs}" takes the engine\'s '
            'log-probabilities for the trainer\'s; set old_logprobs to "policy", or importance_cap to null'
        )
    if module.importance_cap is not None and not module.importance_cap >= 1:
        raise ConfigurationError(f"importance_cap is {module.importance_cap}; set at least 1 (2 is common), or null")
    if module.sequence_parallel_size < 1:
        raise ConfigurationError(f"sequence_parallel_size is {module.sequence_parallel_size}; set 1 (off) or more")
    if module.sequence_parallel_size > 1 and (module.router_aux_coefficient or module.router_z_coefficient):
        raise ConfigurationError(
            f"sequence_parallel_size is {module.sequence_parallel_size}, and a rank sees the routers of its own "
            "stretch of a row only; set router_aux_coefficient and router_z_coefficient to 0, or the size to 1"
        )
    if module.router_aux_coefficient or module.router_z_coefficient:
        check_routers(module.policy)
