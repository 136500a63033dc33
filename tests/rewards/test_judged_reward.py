"""The composite reward with model judges: a failing one, in a group and in a run; names, life, configuration."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from opensearch_lightning.algorithms import group_advantages
from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.composition import compose_config, make
from opensearch_lightning.errors import ConfigurationError, JudgeError, JudgeUnavailable
from opensearch_lightning.models import load_processor
from opensearch_lightning.rewards import (
    ChatAccuracyJudge,
    ChatQueryJudge,
    ChatVisualActionJudge,
    CompositeReward,
    ExactMatchJudge,
    FailureLimit,
    LexicalQueryJudge,
    judge_name,
)
from opensearch_lightning.rewards.prompts import QUERY_DIMENSIONS
from opensearch_lightning.rollout import AgentLoop, SamplingParams
from opensearch_lightning.tools import ToolExecutor
from opensearch_lightning.types import ErrorKind
from tests.rewards.judge_server import JUDGE_KEY
from tests.rewards.steps import TASK, answer, call, trajectory
from tests.scripted_engine import ScriptedEngine, ScriptedSession
from tests.tools.fakes import FakeTool


class Fixed:
    """Judge of searches and visual actions that gives, or raises, what it is told, and counts."""

    def __init__(self, value):
        self.value, self.asked = value, 0

    async def score(self, task, steps):
        self.asked += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


CROPPED = call("crop", arguments={"image": "img_1"})


async def scored(*steps, visual, weight, **options):
    reward = CompositeReward(ExactMatchJudge(), Fixed(0.5), alpha=0.8, visual=visual, visual_weight=weight)
    return await reward.score(TASK, trajectory(*steps, **options))


async def test_visual_actions_have_a_share_of_the_bracket():
    parts = await scored(CROPPED, call(), answer(), visual=Fixed(0.25), weight=0.1)
    assert parts.total == pytest.approx(0.9 * (0.8 * 1 + 0.2 * 0.5) + 0.1 * 0.25)
    assert (parts.format, parts.accuracy, parts.query, parts.visual) == (1.0, 1.0, 0.5, 0.25)


async def test_without_a_weight_nobody_is_asked():
    visual = Fixed(0.25)
    parts = await scored(CROPPED, call(), answer(), visual=visual, weight=0.0)
    assert (parts.total, parts.visual) == (0.8 * 1.0 + (1 - 0.8) * 0.5, None)
    assert visual.asked == 0


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ([call(), answer()], {}),
        ([call("crop", error=ErrorKind.UNKNOWN_IMAGE), call(), answer()], {}),
        ([call(), CROPPED, answer()], {"fatal_step": 1}),
    ],
)
async def test_without_a_visual_action_in_the_prefix_the_bracket_stays(steps, options):
    visual = Fixed(0.25)
    with_it = await scored(*steps, visual=visual, weight=0.5, **options)
    assert with_it == await scored(*steps, visual=None, weight=0.0, **options)
    assert visual.asked == 0


async def test_a_failing_judge_of_visual_actions_leaves_the_trajectory_out():
    with pytest.raises(JudgeError, match="visual judge Fixed of task 't' raised ValueError: x"):
        await scored(CROPPED, answer(), visual=Fixed(ValueError("x")), weight=0.1)
    with pytest.raises(JudgeError, match="visual judge of task 't' returned 2"):
        await scored(CROPPED, answer(), visual=Fixed(2), weight=0.1)


@pytest.mark.parametrize(("weight", "message"), [(1.0, r"visual_weight is 1.0; set it in \[0, 1\)"), (0.1, "nothing")])
def test_weights_that_cannot_be(weight, message):
    with pytest.raises(ConfigurationError, match=message):
        CompositeReward(ExactMatchJudge(), LexicalQueryJudge(), visual_weight=weight)


@pytest.mark.parametrize("also", [0.5, JudgeError("down"), KeyError("x")])
async def test_a_judge_that_is_unavailable_ends_the_run_whatever_the_others_do(also):
    reward = CompositeReward(
        ExactMatchJudge(), Fixed(also), visual=Fixed(JudgeUnavailable("too often")), visual_weight=0.1
    )
    with pytest.raises(JudgeUnavailable, match="too often"):
        await reward.score(TASK, trajectory(CROPPED, call(), answer()))


async def test_the_scorer_is_named(ask):
    chat = ask()
    embedded = CompositeReward(ExactMatchJudge(), LexicalQueryJudge())
    judged = CompositeReward(ChatAccuracyJudge(chat), ChatQueryJudge(chat))
    for reward, names in (
        (embedded, ["exact match", "lexical"]),
        (judged, ["small (accuracy/1)", "small (queries/1)"]),
    ):
        assert [judge_name(judge) for judge in reward.judges.values()] == names
        assert (await reward.score(TASK, trajectory(answer()))).scorer == names[0]
    assert judge_name(Fixed(1)) == "Fixed"


class Rollouts(ScriptedEngine):
    """Rollout ``i`` plays the ``i``-th script."""

    @asynccontextmanager
    async def session(self, key):
        yield ScriptedSession(self.renderer, self.scripts[key.rollout])


async def rolled_out(responses, reward, tiny_model_dir):
    search = '<think>look</think>\n<tool_call>\n{"name": "fake", "arguments": {}}\n</tool_call>'
    scripts = [[search, f"<think>so</think>\n<response>{response}</response>"] for response in responses]
    executor = ToolExecutor([FakeTool()])
    engine = Rollouts(ChatRenderer(load_processor(tiny_model_dir)), scripts)
    try:
        loop = AgentLoop(engine, executor, system_prompt="Search.", reward=reward)
        return await loop.run_group(TASK, len(scripts), SamplingParams())
    finally:
        await executor.aclose()


async def test_a_failed_judge_leaves_its_trajectory_out_of_the_group(server, ask, tiny_model_dir):
    server.answer = lambda record: {
        "first": {"reason": "", "correct": True},
        "second": {"reason": "", "correct": False},
        "third": "prose",
    }[record["response"]]
    reward = CompositeReward(ChatAccuracyJudge(ask()), LexicalQueryJudge(), alpha=0.8)
    group = await rolled_out(["first", "second", "third"], reward, tiny_model_dir)
    assert [run.reward and run.reward.accuracy for run in group.trajectories] == [1.0, 0.0, None]
    rewards = torch.tensor([run.reward.total if run.reward else 0.0 for run in group.trajectories])
    valid = torch.tensor([run.reward is not None for run in group.trajectories])
    advantages = group_advantages(rewards, torch.zeros(3, dtype=torch.long), "rloo", valid_B=valid)
    # Of two that voted, each is measured by the other.
    assert advantages.tolist() == pytest.approx([0.8, -0.8, 0.0])


async def test_a_judge_that_fails_too_often_ends_the_rollouts(server, ask, tiny_model_dir):
    server.faults[None] = "broken"
    chat = ask(failures=FailureLimit(0.5, window=4, least=3))
    reward = CompositeReward(ChatAccuracyJudge(chat), LexicalQueryJudge())
    with pytest.raises(JudgeUnavailable, match="3 of its last 3 judgements"):
        await rolled_out(["first", "second", "third"], reward, tiny_model_dir)


async def test_closing_the_reward_closes_every_judge_that_is_open(server, ask):
    chats = [ask(), ask(), ask()]
    server.answer = {"reason": "", "correct": True, "actions": [{"action": 1, "needed": True, "used": True}]}
    server.answer |= dict.fromkeys(QUERY_DIMENSIONS, 10)
    judges = ChatAccuracyJudge(chats[0]), ChatQueryJudge(chats[1]), ChatVisualActionJudge(chats[2])
    reward = CompositeReward(judges[0], judges[1], visual=judges[2], visual_weight=0.5)
    parts = await reward.score(TASK, trajectory(CROPPED, call(), answer()))
    assert (parts.accuracy, parts.query, parts.visual) == (1.0, 1.0, 1.0)
    assert server.connections == 3
    await reward.aclose()
    await server.all_gone()
    await CompositeReward(ExactMatchJudge(), LexicalQueryJudge()).aclose()


def chat_reward(*overrides):
    return make("reward", compose_config(["experiment=quickstart_grpo", "reward=chat", *overrides])["reward"], {})


def test_the_judges_of_the_paper_are_a_choice_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", JUDGE_KEY)
    reward = chat_reward(f"data_dir={tmp_path}")
    assert [judge_name(judge) for judge in reward.judges.values()] == ["gpt-4o (accuracy/1)", "gpt-5.4 (queries/1)"]
    assert (reward.alpha, reward.visual_weight) == (0.8, 0.0)
    asyncio.run(reward.aclose())


def test_a_judge_of_visual_actions_is_added_in_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", JUDGE_KEY)
    package = "opensearch_lightning.rewards"
    model = f"{{_target_:{package}.ChatModel,name:gpt-4o}}"
    visual = f"{{_target_:{package}.ChatVisualActionJudge,chat:{{_target_:{package}.ChatJudge,model:{model}}}}}"
    reward = chat_reward(f"data_dir={tmp_path}", "reward.visual_weight=0.1", f"reward.visual={visual}")
    assert judge_name(reward.judges["visual"]) == "gpt-4o (visual_actions/1)"
    asyncio.run(reward.aclose())


def test_a_key_that_is_missing_is_named_before_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY is not set: export OPENAI_API_KEY="):
        chat_reward(f"data_dir={tmp_path}")
