"""Pass@1 of a policy in its tool environment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opensearch_lightning.errors import ConfigurationError, OpenSearchError
from opensearch_lightning.types import Task, TrajectoryGroup

if TYPE_CHECKING:
    from opensearch_lightning.rollout import AgentLoop, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PassAt1:
    """Fraction of tasks answered right in one try, over the ``n`` trajectories that were judged.

    ``stderr`` is the binomial standard error ``sqrt(p(1−p)/n)``; ``unjudged`` counts trajectories without a verdict or
    lost to infrastructure, which are in no other figure. ``scorer`` names what judged the answers.
    """

    accuracy: float
    stderr: float
    n: int
    fatal_fraction: float
    turns: float
    unjudged: int = 0
    scorer: str = ""


async def roll_out(loop: AgentLoop, tasks: Sequence[Task], sampling: SamplingParams) -> list[TrajectoryGroup]:
    """One scored trajectory of each task."""
    if not tasks:
        raise ConfigurationError("there are no tasks to evaluate on; check the split and the limit")
    return list(await asyncio.gather(*(loop.run_group(task, 1, sampling) for task in tasks)))


def pass_at_1(groups: Sequence[TrajectoryGroup]) -> PassAt1:
    """Pass@1 over the groups' trajectories.

    Raises:
        OpenSearchError: none was judged, so that there is nothing to report.
    """
    judged = [t for group in groups for t in group.trajectories if t.reward is not None]
    n, lost = len(judged), sum(group.n_lost for group in groups)
    unjudged = sum(len(group.trajectories) for group in groups) - n + lost
    if not n:
        raise OpenSearchError(
            f"nothing was judged: {unjudged} rollouts are without a verdict, {lost} of them lost to infrastructure; "
            "check that the judge and the engine answer (the warnings above say what failed), then evaluate again"
        )
    accuracy = sum(t.reward.accuracy for t in judged if t.reward) / n
    return PassAt1(
        accuracy=accuracy,
        stderr=math.sqrt(accuracy * (1 - accuracy) / n),
        n=n,
        fatal_fraction=sum(t.is_fatal for t in judged) / n,
        turns=sum(len(t.steps) for t in judged) / n,
        unjudged=unjudged,
        scorer=" and ".join(sorted({t.reward.scorer for t in judged if t.reward and t.reward.scorer})),
    )
