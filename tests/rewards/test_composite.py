import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from opensearch_lightning.errors import ConfigurationError, JudgeError
from opensearch_lightning.rewards import CompositeReward, ExactMatchJudge, LexicalQueryJudge
from opensearch_lightning.types import NON_FATAL, ErrorKind, RewardParts, Step, StopReason, Task
from tests.rewards.steps import TASK, answer, call, trajectory


class Verdict:
    """Accuracy judge that returns, or raises, what it is given, and counts."""

    def __init__(self, verdict: Any) -> None:
        self.verdict, self.asked = verdict, 0

    async def judge(self, question: str, response: str, reference: Task) -> bool:
        self.asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


class Score:
    """Query judge that returns, or raises, what it is given, and remembers the steps it saw."""

    def __init__(self, score: Any) -> None:
        self.value, self.seen = score, [-1]

    async def score(self, task: Task, steps: Sequence[Step]) -> float:
        await asyncio.sleep(0.01)
        self.seen = [step.index for step in steps]
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def values(parts: RewardParts) -> tuple[float, float, float, float]:
    return parts.total, parts.format, parts.accuracy, parts.query


async def parts(*steps: Step, accuracy: Any = True, query: Any = 0.5, **options: Any) -> RewardParts:
    reward = CompositeReward(accuracy=Verdict(accuracy), query=Score(query), alpha=0.8)
    return await reward.score(TASK, trajectory(*steps, **options))


async def test_equation_nine() -> None:
    # r_fmt = 3/4 (one step not well formed), 0.8·1 + 0.2·0.5 = 0.9
    steps = [call(), call(well_formed=False), call(), answer()]
    assert values(await parts(*steps)) == pytest.approx((0.675, 0.75, 1.0, 0.5))


async def test_wrong_answer_keeps_the_search_share() -> None:
    assert (await parts(call(), answer(), accuracy=False)).total == pytest.approx(0.1)


async def test_alpha_weighs_accuracy() -> None:
    reward = CompositeReward(accuracy=Verdict(True), query=Score(0.5), alpha=0.25)
    assert (await reward.score(TASK, trajectory(call(), answer()))).total == pytest.approx(0.25 + 0.75 * 0.5)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_the_unit_interval_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigurationError, match=r"alpha.*set it in \[0, 1\]"):
        CompositeReward(accuracy=ExactMatchJudge(), query=LexicalQueryJudge(), alpha=alpha)


async def test_fatal_trajectory_is_judged_on_its_valid_prefix() -> None:
    error = ErrorKind.TIMEOUT
    steps = [call(), call(well_formed=False), call(error=error), call(error=error), call(error=error)]
    query = Score(0.5)
    reward = CompositeReward(accuracy=Verdict(True), query=query, alpha=0.8)
    scored = await reward.score(TASK, trajectory(*steps, fatal_step=2))
    # two steps before f = 2, one well formed; no response
    assert values(scored) == pytest.approx((0.5 * 0.2 * 0.5, 0.5, 0.0, 0.5))
    assert query.seen == [0, 1]


async def test_empty_prefix_scores_nothing() -> None:
    scored = await parts(*[call(error=ErrorKind.TIMEOUT)] * 3, fatal_step=0)
    assert scored == RewardParts(total=0.0, format=0.0, accuracy=0.0, query=0.0)


async def test_recovered_trajectory_keeps_its_accuracy() -> None:
    error = ErrorKind.BACKEND_ERROR
    steps = [call(), call(error=error), call(error=error), call(error=error), call(), answer()]
    assert values(await parts(*steps, fatal_step=1)) == pytest.approx((0.9, 1.0, 1.0, 0.5))


async def test_run_out_of_turns_is_judged_whole() -> None:
    scored = await parts(call(), call(), fatal_step=NON_FATAL, is_fatal=True)
    assert values(scored) == pytest.approx((0.5 * 0.2 * 0.5, 0.5, 0.0, 0.5))


async def test_an_answer_in_a_cut_turn_is_no_answer() -> None:
    reward = CompositeReward(accuracy=ExactMatchJudge(), query=Score(0.5), alpha=0.8)
    answered = trajectory(call(), answer(TASK.answer))
    cut = replace(answered, stop_reason=StopReason.MAX_TOKENS)
    assert [(await reward.score(TASK, t)).accuracy for t in (answered, cut)] == [1.0, 0.0]


async def test_judges_are_not_asked_without_need() -> None:
    accuracy, query = Verdict(True), Score(1.0)
    reward = CompositeReward(accuracy=accuracy, query=query, alpha=0.8)
    assert (await reward.score(TASK, trajectory(call("crop"), call("crop")))).total == 0.0
    assert (await reward.score(TASK, trajectory(answer(" ")))).accuracy == 0.0
    assert accuracy.asked == 0
    assert query.seen == [-1]


@pytest.mark.parametrize("failing", [{"accuracy": JudgeError("down")}, {"query": JudgeError("down")}])
async def test_failing_judge_raises(failing: dict[str, Exception]) -> None:
    with pytest.raises(JudgeError, match="down"):
        await parts(call(), answer(), **failing)


async def test_failure_of_one_judge_waits_for_the_other() -> None:
    query = Score(0.5)
    reward = CompositeReward(accuracy=Verdict(JudgeError("down")), query=query, alpha=0.8)
    with pytest.raises(JudgeError):
        await reward.score(TASK, trajectory(call(), answer()))
    assert query.seen == [0, 1]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"accuracy": TypeError("no text")}, r"accuracy judge Verdict of task .* raised TypeError: no text"),
        ({"query": KeyError("score")}, r"query judge Score of task .* raised KeyError: 'score'"),
    ],
)
async def test_any_failure_is_the_judges(failing: dict[str, Exception], message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        await parts(call(), answer(), **failing)


@pytest.mark.parametrize("score", [1.2, -0.1, float("nan"), None, "0.5", True])
async def test_what_is_no_number_of_the_unit_interval_is_no_score(score: Any) -> None:
    with pytest.raises(JudgeError, match="not a score in"):
        await parts(call(), answer(), query=score)


async def test_unclear_verdict_is_no_verdict() -> None:
    with pytest.raises(JudgeError, match="returned None"):
        await parts(call(), answer(), accuracy=None)


async def test_embedded_judges() -> None:
    reward = CompositeReward(accuracy=ExactMatchJudge(), query=LexicalQueryJudge(), alpha=0.8)
    found = call(arguments={"q": "mayor Velmora"}, text="1. Velmora: the mayor is Ada Quist.", hits=1)
    scored = await reward.score(TASK, trajectory(found, answer("ada quist")))
    # relevance 1, progression 1, signal 1, complementarity 1/2
    assert values(scored) == pytest.approx((0.8 + 0.2 * 0.875, 1.0, 1.0, 0.875))
