"""How long the updates take: operations over what the GPUs do, bytes over what the links carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.flops import forward_flops_by_part, training_flops
from opensearch_lightning.planning.clusters import Cluster
from opensearch_lightning.planning.figures import Assumptions, Figures
from opensearch_lightning.planning.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Training:
    """One update, and the run.

    Attributes:
        updates: of the whole run.
        updates_per_step: of a step of the Trainer; 1 when fine-tuning.
        trajectories: of an update, all ranks together.
        tokens: of an update, all ranks together, as the model reads them.
        passes: forward and backward passes of an update on each rank.
        flops: of an update, all ranks together (model FLOPs).
        compute: seconds of an update for these at the assumed utilization, all ranks level.
        compute_longest: seconds of an update in which one rank has rows of the greatest length; 0 with packed rows,
            which keep ranks level.
        gathered: bytes that every rank receives in an update: weights and gradients.
        communication: seconds of an update for these, at least.
        network_needed: bytes per second of a node below which an update waits for communication.
    """

    updates: int
    updates_per_step: int
    trajectories: int
    tokens: float
    passes: int
    flops: float
    compute: float
    compute_longest: float
    gathered: float
    communication: float
    network_needed: float

    @property
    def bound(self) -> str:
        """What an update waits for."""
        return "compute" if self.compute >= self.communication else "communication"

    @property
    def seconds(self) -> float:
        """Of an update where communication hides behind computing."""
        return max(self.compute, self.communication)

    @property
    def seconds_apart(self) -> float:
        """Of an update where nothing overlaps."""
        return self.compute + self.communication


def count_training(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> Training:
    """Updates of a run and what each takes; scoring before the updates of a step is :func:`count_scoring`'s."""
    longest = 0.0
    rank_flops = cluster.flops * assumed.mfu
    if setup.kind == "sft":
        flops, tokens = _sft_row(setup, figures, figures.row_lengths())
        if not setup.packed:
            row, _ = _sft_row(setup, figures, [setup.max_length] * len(figures.row_lengths()))
            longest = row * setup.rows_per_rank / rank_flops
        rows = rows_per_update(setup, figures)
        flops, tokens, per_step = flops * rows, tokens * rows, 1
        passes = _sft_passes(setup, tokens)
    else:
        rows = setup.mini_batch_prompts * setup.group_size
        forward, tokens = _group(setup, figures)
        # few parts are ever frozen here: three times the forward pass
        tokens, flops = tokens * setup.mini_batch_prompts, 3 * forward * setup.mini_batch_prompts
        passes = _passes(setup, tokens)
        per_step = math.ceil(setup.prompts_per_step / setup.mini_batch_prompts)
    gathered = passes * _weights_gathered(setup, sweeps=2) + _shared_once(setup)
    compute = flops / (setup.ranks * rank_flops)
    return Training(
        updates=_updates(setup, figures, rows),
        updates_per_step=per_step,
        trajectories=round(rows),
        tokens=tokens,
        passes=passes,
        flops=flops,
        compute=compute,
        compute_longest=longest,
        gathered=gathered,
        communication=_link_seconds(setup, gathered, cluster, assumed),
        network_needed=_between_nodes(setup, gathered) / compute,
    )


def count_scoring(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> float:
    """Seconds of a GRPO step for log-probabilities of all its rollouts, before the first update."""
    if not setup.scoring_passes:
        return 0.0
    forward, tokens = _group(setup, figures)
    compute = forward * setup.prompts_per_step / (setup.ranks * cluster.flops * assumed.mfu)
    passes = _passes(setup, tokens * setup.prompts_per_step)
    gathered = passes * _weights_gathered(setup, sweeps=1)
    return setup.scoring_passes * max(compute, _link_seconds(setup, gathered, cluster, assumed))


def group_forward_flops(setup: Setup, figures: Figures) -> dict[str, float]:
    """Operations of one forward pass over the rollouts of a task, which share their prompt, by part."""
    length = round(figures.mean_tokens)
    prompt = round(figures.prompt_of(length))
    images = [figures.patches_of_image(setup.shape.vision.patch)]
    sampled = setup.group_size * round(figures.sampled_tokens)
    made = round(setup.group_size * max(0.0, figures.images_per_row - 1))
    whole = forward_flops_by_part(
        setup.shape,
        lengths=[length] * setup.group_size,
        supervised=sampled,
        patches=images * (1 + made),
    )
    # all but the first rollout find the prompt read
    shared = forward_flops_by_part(setup.shape, lengths=[prompt] * (setup.group_size - 1), supervised=0, patches=[])
    return {part: flops - shared[part] for part, flops in whole.items()}


def group_tokens(setup: Setup, figures: Figures) -> float:
    """Tokens of the rollouts of a task, their prompt counted once."""
    prompt = figures.prompt_of(figures.mean_tokens)
    return prompt + setup.group_size * (figures.mean_tokens - prompt)


def rows_per_update(setup: Setup, figures: Figures) -> float:
    """Trajectories of an update of fine-tuning, all ranks together."""
    rows = float(setup.rows_per_rank * setup.ranks)
    if setup.full_packs and setup.max_tokens is not None:
        return rows * setup.max_tokens / figures.mean_tokens
    return rows


def _group(setup: Setup, figures: Figures) -> tuple[float, float]:
    """Of the rollouts of a task: operations of a forward pass, tokens."""
    return sum(group_forward_flops(setup, figures).values()), group_tokens(setup, figures)


def _sft_row(setup: Setup, figures: Figures, lengths: Sequence[int]) -> tuple[float, float]:
    """Operations and tokens of a mean row of ``lengths``; images and sampled tokens are in proportion to tokens."""
    rows = len(lengths)
    share = sum(lengths) / rows / figures.mean_tokens
    patches = figures.patches_of_image(setup.shape.vision.patch)
    images = figures.images_per_row * share * rows
    flops = training_flops(
        setup.shape,
        lengths=lengths,
        supervised=round(figures.sampled_tokens * share * rows),
        patches=[patches] * round(images),
        frozen=setup.frozen,
    )
    return flops / rows, sum(lengths) / rows


def _updates(setup: Setup, figures: Figures, rows: float) -> int:
    if setup.max_steps is not None:
        return setup.max_steps
    if setup.kind == "sft" and setup.max_epochs is not None:
        return math.ceil(setup.max_epochs * figures.rows / rows)
    raise ConfigurationError("the run has no end; set trainer.max_steps")


def _sft_passes(setup: Setup, tokens: float) -> int:
    """Passes of each rank: by rows where they are padded, by tokens where those are limited."""
    by_tokens = 1 if setup.max_tokens is None else math.ceil(tokens / setup.ranks / setup.max_tokens)
    if setup.packed:
        return by_tokens
    return max(by_tokens, math.ceil(setup.rows_per_rank / setup.rows_per_pass))


def _passes(setup: Setup, tokens: float) -> int:
    """Passes that each rank needs for its share of ``tokens``; at least one."""
    groups = setup.ranks / setup.sequence_parallel
    return max(1, math.ceil(tokens / groups / (setup.max_tokens or setup.max_length)))


def _weights_gathered(setup: Setup, *, sweeps: int) -> float:
    """Bytes of weights that a rank receives in a pass that walks through the layers ``sweeps`` times."""
    return sweeps * setup.width * setup.parameters if setup.zero.stage == 3 else 0.0


def _shared_once(setup: Setup) -> float:
    """Bytes that a rank receives once an update: gradients, and under ZeRO-2 and DDP what makes weights whole again."""
    trained = setup.width * setup.trained_total
    return trained if setup.zero.stage == 3 else 2.0 * trained


def _between_nodes(setup: Setup, received: float) -> float:
    """Bytes that a node receives from others where each of its ranks needs ``received``."""
    return received * (setup.nodes - 1) / setup.nodes


def _link_seconds(setup: Setup, received: float, cluster: Cluster, assumed: Assumptions) -> float:
    """Seconds in which every rank receives ``received`` bytes.

    A node receives once what its ranks do not hold, and hands it on over NVLink; the slower of both counts.
    """
    if setup.ranks == 1:
        return 0.0
    between = _between_nodes(setup, received) / cluster.network
    inside = received * (setup.ranks_per_node - 1) / setup.ranks_per_node / cluster.nvlink
    return max(between, inside) / assumed.network
