"""All of a plan, from a setup, figures and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from opensearch_lightning.planning.clusters import Cluster
from opensearch_lightning.planning.figures import Assumptions, Figures
from opensearch_lightning.planning.memory import Memory, count_memory
from opensearch_lightning.planning.paper import DAY, RUNS, Comparison
from opensearch_lightning.planning.remedies import remedies
from opensearch_lightning.planning.rollouts import Rollouts, count_rollouts
from opensearch_lightning.planning.setup import Setup
from opensearch_lightning.planning.training import Training, count_scoring, count_training


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need.

    Attributes:
        setup: the run.
        figures: of its data.
        cluster: it runs on.
        assumed: how much of the cluster it gets.
        memory: of a GPU and of a node.
        remedies: what to change, where it does not fit; empty where it does.
        training: of the updates.
        scoring: seconds of a GRPO step before its updates.
        rollouts: of a GRPO step.
        comparison: with the paper's run of this model on as many of the same GPUs.
    """

    setup: Setup
    figures: Figures
    cluster: Cluster
    assumed: Assumptions
    memory: Memory
    remedies: list[str]
    training: Training
    scoring: float
    rollouts: Rollouts | None
    comparison: Comparison | None

    @property
    def fits(self) -> bool:
        """Whether a GPU holds it."""
        return self.memory.peak <= self.cluster.memory

    @property
    def steps(self) -> float:
        """Steps of the Trainer: updates of fine-tuning, rounds of rollouts of GRPO."""
        return self.training.updates / self.training.updates_per_step

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; rollouts that run ahead hide behind training, or it behind them."""
        return _step_seconds(self.setup, self.training, self.scoring, self.rollouts)

    @property
    def seconds(self) -> float:
        """Seconds of the run, without validation, checkpoints and waiting for data."""
        return self.steps * self.step_seconds


def make_plan(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> Plan:
    """Count everything.

    Raises:
        ConfigurationError: the run has no end.
    """
    memory = count_memory(setup, figures, reserve=assumed.reserve)
    training = count_training(setup, figures, cluster, assumed)
    rollouts = count_rollouts(setup, figures, cluster, assumed) if setup.kind == "grpo" else None
    scoring = count_scoring(setup, figures, cluster, assumed)
    return Plan(
        setup=setup,
        figures=figures,
        cluster=cluster,
        assumed=assumed,
        memory=memory,
        remedies=[] if memory.peak <= cluster.memory else remedies(setup, figures, cluster, assumed),
        training=training,
        scoring=scoring,
        rollouts=rollouts,
        comparison=_compare(setup, cluster, assumed, training, _step_seconds(setup, training, scoring, rollouts)),
    )


def _step_seconds(setup: Setup, training: Training, scoring: float, rollouts: Rollouts | None) -> float:
    updating = scoring + training.updates_per_step * training.seconds
    if rollouts is None:
        return updating
    return max(rollouts.seconds, updating) if setup.ahead else rollouts.seconds + updating


def _compare(
    setup: Setup, cluster: Cluster, assumed: Assumptions, training: Training, step_seconds: float
) -> Comparison | None:
    run = RUNS.get((setup.kind, setup.model))
    gpus = setup.ranks + setup.servers * assumed.tensor_parallel
    if run is None or cluster.name != "h20" or gpus != run.gpus:
        return None
    seconds = run.days * DAY
    return Comparison(
        run=run,
        estimated_days=run.updates / training.updates_per_step * step_seconds / DAY,
        longest_days=run.updates * training.compute_longest / DAY if training.compute_longest else None,
        implied_mfu=training.flops * run.updates / (seconds * setup.ranks * cluster.flops),
        implied_network=training.gathered * (setup.nodes - 1) / setup.nodes * run.updates / seconds,
    )
