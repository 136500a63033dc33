"""The reward of a trajectory (Eq. 9)."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Protocol

from opensearch_lightning.errors import ConfigurationError, JudgeError
from opensearch_lightning.rewards.form import format_reward
from opensearch_lightning.rewards.queries import searches
from opensearch_lightning.types import RewardParts, Step, Task, Trajectory


class AccuracyJudge(Protocol):
    """Decides whether a response answers the question."""

    async def judge(self, question: str, response: str, reference: Task) -> bool:
        """Whether ``response`` agrees with the reference; raises :class:`JudgeError` when it cannot tell."""
        ...


class QueryJudge(Protocol):
    """Scores the searches of a trajectory."""

    async def score(self, task: Task, steps: Sequence[Step]) -> float:
        """Score in [0, 1]; raises :class:`JudgeError` when it cannot tell."""
        ...


class CompositeReward:
    """``r = r_fmt · [α·r_acc + (1−α)·r_query]`` (Eq. 9).

    Format and search quality look at the valid prefix only: the steps before ``trajectory.fatal_step`` (all steps
    where that is ``NON_FATAL``, also for a run out of turns or tokens). An empty prefix scores 0 in both. Accuracy
    is judged on the final response, and is 0 without one. A trajectory that went on after its fatal step and answered
    keeps its accuracy: the mask cuts its gradient, the answer it gave is still an answer.

    Args:
        accuracy: judge of the final response.
        query: judge of the searches; it is not asked about a prefix without any (the score is 0).
        alpha: weight of accuracy against search quality, in [0, 1].

    Raises:
        ConfigurationError: ``alpha`` outside [0, 1].
    """

    def __init__(self, accuracy: AccuracyJudge, query: QueryJudge, *, alpha: float = 0.8) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigurationError(f"alpha weighs accuracy against search quality; got {alpha}, set it in [0, 1].")
        self.accuracy = accuracy
        self.query = query
        self.alpha = alpha

    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        """Reward of one trajectory.

        Raises:
            JudgeError: a judge failed, in whatever way, or returned what is no verdict or score; leave the trajectory
                out of its group.
        """
        prefix = [step for step in trajectory.steps if step.index < trajectory.fatal_step]
        form = format_reward(prefix, complete=len(prefix) == len(trajectory.steps))
        # Both are awaited to their end, so that one judge's failure leaves no call of the other behind.
        accuracy, query = await asyncio.gather(
            self._accuracy(task, trajectory.response), self._query(task, prefix), return_exceptions=True
        )
        if isinstance(accuracy, BaseException):
            raise accuracy
        if isinstance(query, BaseException):
            raise query
        total = form * (self.alpha * accuracy + (1 - self.alpha) * query)
        return RewardParts(total=total, format=form, accuracy=accuracy, query=query)

    async def _accuracy(self, task: Task, response: str | None) -> float:
        if response is None or not response.strip():
            return 0.0
        with _naming("accuracy", self.accuracy, task):
            verdict = await self.accuracy.judge(task.question, response, task)
        if not isinstance(verdict, bool):
            raise JudgeError(f"accuracy judge of task {task.id!r} returned {verdict!r}, not true or false.")
        return float(verdict)

    async def _query(self, task: Task, prefix: Sequence[Step]) -> float:
        if not searches(task.question, prefix):
            return 0.0
        with _naming("query", self.query, task):
            score = await self.query.score(task, prefix)
        is_number = isinstance(score, Real) and not isinstance(score, bool)
        if not (is_number and math.isfinite(score) and 0.0 <= score <= 1.0):
            raise JudgeError(f"query judge of task {task.id!r} returned {score!r}, not a score in [0, 1].")
        return float(score)


@contextmanager
def _naming(role: str, judge: object, task: Task) -> Iterator[None]:
    """Turn whatever a judge raises into a ``JudgeError``: one trajectory is left out, the run goes on."""
    try:
        yield
    except JudgeError:
        raise
    except Exception as error:
        raise JudgeError(
            f"{role} judge {type(judge).__name__} of task {task.id!r} raised {type(error).__name__}: {error}."
        ) from error
