"""The reward of a trajectory (Eq. 9)."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Protocol

from opensearch_lightning.errors import ConfigurationError, JudgeError, JudgeUnavailable
from opensearch_lightning.rewards.form import format_reward
from opensearch_lightning.rewards.queries import searches
from opensearch_lightning.rewards.visual_actions import visual_actions
from opensearch_lightning.types import Closable, RewardParts, Step, Task, Trajectory


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

    With a ``visual_weight`` ``w`` above 0, which is no part of the paper, the bracket becomes
    ``(1−w)·[α·r_acc + (1−α)·r_query] + w·r_visual`` where the valid prefix holds a visual action that was carried out;
    elsewhere it stays as it is, so that looking at nothing is neither rewarded nor punished.

    Args:
        accuracy: judge of the final response.
        query: judge of the searches; it is not asked about a prefix without any (the score is 0).
        alpha: weight of accuracy against search quality, in [0, 1].
        visual: judge of the visual actions; it is asked only with a weight above 0.
        visual_weight: ``w``, in [0, 1).

    Raises:
        ConfigurationError: a weight out of its range, or a ``visual_weight`` without a judge.
    """

    def __init__(
        self,
        accuracy: AccuracyJudge,
        query: QueryJudge,
        *,
        alpha: float = 0.8,
        visual: QueryJudge | None = None,
        visual_weight: float = 0.0,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ConfigurationError(f"alpha weighs accuracy against search quality; got {alpha}, set it in [0, 1].")
        if not 0.0 <= visual_weight < 1.0:
            raise ConfigurationError(f"visual_weight is {visual_weight}; set it in [0, 1), 0 for off.")
        if visual_weight > 0 and visual is None:
            raise ConfigurationError(
                f"visual_weight is {visual_weight}, but nothing judges visual actions; set visual to a judge, such as "
                "ChatVisualActionJudge, or visual_weight to 0."
            )
        self.accuracy = accuracy
        self.query = query
        self.alpha = alpha
        self.visual = visual if visual_weight > 0 else None
        self.visual_weight = visual_weight

    @property
    def judges(self) -> Mapping[str, object]:
        """The judges that are asked, by the part of the reward that is theirs."""
        judges = {"accuracy": self.accuracy, "query": self.query}
        return judges if self.visual is None else {**judges, "visual": self.visual}

    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        """Reward of one trajectory.

        Raises:
            JudgeError: a judge failed, in whatever way, or returned what is no verdict or score; leave the trajectory
                out of its group.
            JudgeUnavailable: a judge fails too often to go on.
        """
        prefix = [step for step in trajectory.steps if step.index < trajectory.fatal_step]
        form = format_reward(prefix, complete=len(prefix) == len(trajectory.steps))
        # All are awaited to their end, so that one judge's failure leaves no call of another behind.
        outcomes = await asyncio.gather(
            self._accuracy(task, trajectory.response),
            self._query(task, prefix),
            self._visual(task, prefix),
            return_exceptions=True,
        )
        accuracy, query, visual = _all_judged(outcomes)
        assert accuracy is not None and query is not None
        bracket = self.alpha * accuracy + (1 - self.alpha) * query
        if visual is not None:
            bracket = (1 - self.visual_weight) * bracket + self.visual_weight * visual
        return RewardParts(
            total=form * bracket,
            format=form,
            accuracy=accuracy,
            query=query,
            visual=visual,
            scorer=judge_name(self.accuracy),
        )

    async def aclose(self) -> None:
        """Close what the judges hold open; they can be asked again."""
        for judge in self.judges.values():
            if isinstance(judge, Closable):
                await judge.aclose()

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
        return await _score("query", self.query, task, prefix)

    async def _visual(self, task: Task, prefix: Sequence[Step]) -> float | None:
        if self.visual is None or not visual_actions(prefix):
            return None
        return await _score("visual", self.visual, task, prefix)


async def _score(role: str, judge: QueryJudge, task: Task, prefix: Sequence[Step]) -> float:
    with _naming(role, judge, task):
        score = await judge.score(task, prefix)
    is_number = isinstance(score, Real) and not isinstance(score, bool)
    if not (is_number and math.isfinite(score) and 0.0 <= score <= 1.0):
        raise JudgeError(f"{role} judge of task {task.id!r} returned {score!r}, not a score in [0, 1].")
    return float(score)


def _all_judged(outcomes: Sequence[float | BaseException | None]) -> list[float | None]:
    """The outcomes when none is an exception; else raises one, that which ends the run before all others."""
    raised = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    raised.sort(key=lambda error: isinstance(error, JudgeError))
    if raised:
        raise raised[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def judge_name(judge: object) -> str:
    """What a report calls a judge: its ``name`` where it has one, else its class."""
    return getattr(judge, "name", None) or type(judge).__name__


@contextmanager
def _naming(role: str, judge: object, task: Task) -> Iterator[None]:
    """Turn whatever a judge raises into a ``JudgeError``: one trajectory is left out, the run goes on.

    ``JudgeUnavailable`` stays what it is, and ends the run.
    """
    try:
        yield
    except (JudgeError, JudgeUnavailable):
        raise
    except Exception as error:
        raise JudgeError(
            f"{role} judge {type(judge).__name__} of task {task.id!r} raised {type(error).__name__}: {error}."
        ) from error
