"""How long the rollouts of a GRPO step take: decoding waits for memory, the rest for matrix products and tools."""

from __future__ import annotations

from dataclasses import dataclass

from opensearch_lightning.planning.clusters import Cluster
from opensearch_lightning.planning.figures import Assumptions, Figures
from opensearch_lightning.planning.setup import Setup
from opensearch_lightning.planning.training import group_forward_flops

_BFLOAT16 = 2


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of one step.

    Attributes:
        trajectories: of a step.
        sampled: tokens that the policy writes in a step.
        engines: servers, or training processes where they sample.
        gpus: GPUs of one engine.
        at_once: sequences that an engine decodes together.
        token_seconds: seconds of one token of all of these.
        tokens_per_second: of all engines together.
        decoding: seconds of a step.
        prefill: seconds of a step for prompts and what tools returned.
        tools: seconds that one trajectory waits for its tools, while others decode.
    """

    trajectories: int
    sampled: float
    engines: int
    gpus: int
    at_once: int
    token_seconds: float
    tokens_per_second: float
    decoding: float
    prefill: float
    tools: float

    @property
    def seconds(self) -> float:
        """Of a step: engines busy to the end, and the last trajectory's tools."""
        return self.decoding + self.prefill + self.tools


def count_rollouts(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> Rollouts:
    """Rollouts of a GRPO step of mean trajectories.

    A step of decoding reads the weights once for all sequences and the cache of each of them.
    """
    trajectories = setup.prompts_per_step * setup.group_size
    engines = setup.servers or setup.ranks
    gpus = assumed.tensor_parallel if setup.servers else 1
    at_once = max(1, min(assumed.max_sequences, trajectories // engines))
    context = (figures.prompt_of(figures.mean_tokens) + figures.mean_tokens) / 2
    read = _weights_read(setup, at_once) + at_once * context * setup.shape.cache_values * _BFLOAT16
    by_memory = read / (gpus * cluster.bandwidth * assumed.decoding)
    by_compute = 2 * _language_active(setup) * at_once / (gpus * cluster.flops * assumed.mfu)
    token_seconds = max(by_memory, by_compute)
    per_second = engines * at_once / token_seconds
    sampled = trajectories * figures.sampled_tokens
    forward = sum(group_forward_flops(setup, figures).values()) * setup.prompts_per_step
    observed = 1 - figures.sampled_tokens / figures.mean_tokens
    return Rollouts(
        trajectories=trajectories,
        sampled=sampled,
        engines=engines,
        gpus=gpus,
        at_once=at_once,
        token_seconds=token_seconds,
        tokens_per_second=per_second,
        decoding=sampled / per_second,
        prefill=forward * observed / (engines * gpus * cluster.flops * assumed.mfu),
        tools=figures.tool_turns * assumed.tool_seconds,
    )


def _weights_read(setup: Setup, sequences: int) -> float:
    """Bytes of weights that one step of decoding reads: of experts those that any of the sequences chooses."""
    counts = setup.shape.parameters()
    shape = setup.shape
    dense = sum(counts[part] for part in ("attention", "mlp", "router", "norms"))
    # the output layer, which a tied embedding is
    output = shape.vocabulary * shape.hidden
    chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** sequences if shape.experts else 0.0
    return _BFLOAT16 * (dense + output + chosen * counts["experts"])


def _language_active(setup: Setup) -> float:
    counts = setup.shape.active_parameters()
    return sum(counts[part] for part in ("attention", "mlp", "experts", "router")) + (
        setup.shape.vocabulary * setup.shape.hidden
    )
