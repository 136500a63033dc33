import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.errors import ConfigurationError, JudgeError
from opensearch_lightning.models import load_processor
from opensearch_lightning.rollout import AgentLoop, FinishReason, SamplingParams, SessionKey
from opensearch_lightning.tools import FaultInjector, ToolExecutor, offline_tools
from opensearch_lightning.types import NON_FATAL, ErrorKind, RewardParts, StopReason, Task, Trajectory
from tests.scripted_engine import ScriptedEngine, Turn

ANSWER = "<think>so</think>\n<response>Lyon</response>"
SEARCH = '<think>look</think>\n<tool_call>\n{"name": "text_search", "arguments": {"q": "%s"}}\n</tool_call>'
CROP_ARGUMENTS = '{"image": "img_1", "x": 0, "y": 0, "width": 32, "height": 32}'
CROP = f'<think>cut</think>\n<tool_call>\n{{"name": "crop", "arguments": {CROP_ARGUMENTS}}}\n</tool_call>'
BAD = '<think>x</think>\n<tool_call>\n{"name": "teleport", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> ChatRenderer:
    return ChatRenderer(load_processor(tiny_model_dir))


@pytest.fixture(scope="module")
def task() -> Task:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    return Task(id="t", question="Where?", answer="Lyon", images=(buffer.getvalue(),))


def run(
    renderer: ChatRenderer,
    world: Any,
    task: Task,
    turns: Sequence[Turn],
    faults: FaultInjector | None = None,
    **settings: Any,
) -> Trajectory:
    async def go() -> Trajectory:
        executor = ToolExecutor(offline_tools(world), faults=faults)
        loop = AgentLoop(ScriptedEngine(renderer, turns), executor, system_prompt="Search.", **settings)
        try:
            return await loop.run(task, 0, SamplingParams())
        finally:
            await executor.aclose()

    return asyncio.run(go())


def test_tokens_steps_and_logprobs_are_kept_as_sampled(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "seat", CROP, ANSWER])
    assert done.stop_reason is StopReason.RESPONSE
    assert done.response == "Lyon"
    assert not done.is_fatal
    assert done.fatal_step == NON_FATAL
    assert len(done.token_ids) == len(done.step_ids) == len(done.sampling_logprobs)
    for step, text in enumerate([SEARCH % "seat", CROP, ANSWER]):
        sampled = done.token_ids[done.step_ids == step].tolist()
        assert sampled == [*renderer.action(text), renderer.end_of_turn_id]
    assert (done.sampling_logprobs[done.step_ids >= 0] == -0.5).all()
    assert (done.sampling_logprobs[done.step_ids < 0] == 0).all()
    assert [image.name for image in done.images] == ["img_1", "img_2"]
    assert done.steps[1].image_name == "img_2"
    pads = sum(t * h * w // renderer.merge_size**2 for t, h, w in (image.grid_thw for image in done.images))
    assert int((done.token_ids == renderer.image_token_id).sum()) == pads


def test_a_rollout_has_the_tokens_of_the_same_conversation_in_training(
    renderer: ChatRenderer, tiny_world: Any, task: Task
) -> None:
    from opensearch_lightning.chat import AssistantTurn, ObservationTurn, UserTurn

    done = run(renderer, tiny_world, task, [CROP, ANSWER], render_tools=False)
    crop = done.steps[0].result
    assert crop is not None
    assert crop.image is not None
    turns = [
        UserTurn(parts=[*task.images, task.question]),
        AssistantTurn(text=CROP),
        ObservationTurn(parts=[crop.text, crop.image]),
        AssistantTurn(text=ANSWER),
    ]
    sample = renderer.conversation("Search.", turns)
    # the template's newline behind the last turn is nobody's
    assert sample.token_ids.tolist()[:-1] == done.token_ids.tolist()
    assert sample.step_ids.tolist()[:-1] == done.step_ids.tolist()


def test_the_policy_is_told_of_its_tools_unless_its_prompt_does_so_itself(
    renderer: ChatRenderer, tiny_world: Any, task: Task
) -> None:
    told = renderer.decode(run(renderer, tiny_world, task, [ANSWER]).token_ids.tolist())
    assert all(f'"name": "{tool.name}"' in told for tool in offline_tools(tiny_world))
    untold = renderer.decode(run(renderer, tiny_world, task, [ANSWER], render_tools=False).token_ids.tolist())
    assert "text_search" not in untold


@pytest.mark.parametrize(("onset", "fatal_step"), [("first", 1), ("threshold", 3)])
def test_three_errors_in_a_row_are_fatal(
    renderer: ChatRenderer, tiny_world: Any, task: Task, onset: Any, fatal_step: int
) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "a", BAD, "no action at all", BAD, ANSWER], fatal_onset=onset)
    assert done.stop_reason is StopReason.FATAL_ERRORS
    assert done.fatal_step == fatal_step
    assert done.is_fatal
    assert [step.error for step in done.steps] == [
        None,
        ErrorKind.UNKNOWN_TOOL,
        ErrorKind.NO_ACTION,
        ErrorKind.UNKNOWN_TOOL,
    ]
    assert done.response is None


def test_a_success_in_between_resets_the_counter(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [BAD, BAD, SEARCH % "a", BAD, BAD, ANSWER])
    assert done.stop_reason is StopReason.RESPONSE
    assert done.fatal_step == NON_FATAL


def test_only_counted_kinds_are_fatal(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [BAD, BAD, BAD, ANSWER], counted_errors=["timeout"])
    assert done.stop_reason is StopReason.RESPONSE


def test_infrastructure_faults_count_and_are_told_to_the_policy(
    renderer: ChatRenderer, tiny_world: Any, task: Task
) -> None:
    faults = FaultInjector(0, {ErrorKind.TIMEOUT: 1.0})
    done = run(renderer, tiny_world, task, [SEARCH % "a", SEARCH % "b", SEARCH % "c"], faults=faults)
    assert done.stop_reason is StopReason.FATAL_ERRORS
    assert done.fatal_step == 0
    shown = renderer.decode(done.token_ids[done.step_ids < 0].tolist())
    assert "timeout" in shown


def test_the_same_call_again_and_again_is_fatal_from_its_first(
    renderer: ChatRenderer, tiny_world: Any, task: Task
) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "a", SEARCH % "b"])
    assert done.stop_reason is StopReason.REPETITION
    assert done.fatal_step == 1
    assert len(done.steps) == 4


def test_a_turn_that_loops_to_its_limit_is_fatal_there(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "a", (" ab" * 40, FinishReason.LENGTH)])
    assert (done.stop_reason, done.fatal_step) == (StopReason.REPETITION, 1)


def test_out_of_turns_keeps_every_token_and_is_fatal_for_the_clamp(
    renderer: ChatRenderer, tiny_world: Any, task: Task
) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "a", SEARCH % "b", SEARCH % "c"], max_turns=2)
    assert done.stop_reason is StopReason.MAX_TURNS
    assert done.is_fatal
    assert done.fatal_step == NON_FATAL


def test_out_of_tokens(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [SEARCH % "a", SEARCH % "b", ANSWER], max_response_tokens=60)
    assert done.stop_reason is StopReason.MAX_TOKENS
    assert done.is_fatal
    assert done.response is None
    first = int((done.step_ids >= 0).nonzero()[0])
    assert len(done.token_ids) - first <= 60


def test_a_prompt_past_the_model_length(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [("", FinishReason.CONTEXT)])
    assert done.stop_reason is StopReason.CONTEXT_LENGTH
    assert done.is_fatal
    assert int((done.step_ids >= 0).sum()) == 0


class BrokenJudge:
    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        raise JudgeError("unreadable verdict")


def group_of(renderer: ChatRenderer, world: Any, task: Task, turns: Sequence[Turn], size: int, **settings: Any) -> Any:
    async def go() -> Any:
        executor = ToolExecutor(offline_tools(world))
        engine = ScriptedEngine(renderer, turns)
        loop = AgentLoop(engine, executor, system_prompt="Search.", **settings)
        try:
            return engine, await loop.run_group(task, size, SamplingParams(), first_rollout=4)
        finally:
            await executor.aclose()

    return asyncio.run(go())


def test_a_judge_that_fails_leaves_no_reward(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    _, group = group_of(renderer, tiny_world, task, [ANSWER], 2, reward=BrokenJudge())
    assert [t.reward for t in group.trajectories] == [None, None]
    assert group.n_lost == 0


def test_lost_rollouts_are_counted_and_no_trajectories(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    engine, group = group_of(renderer, tiny_world, task, [RuntimeError("engine died")], 3)
    assert group.trajectories == ()
    assert group.n_lost == 3
    assert SessionKey(task_id="t", rollout=6) in engine.sessions


@pytest.mark.parametrize("bad", [{"max_turns": 0}, {"fatal_k": 0}, {"fatal_onset": "last"}])
def test_impossible_settings(renderer: ChatRenderer, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        AgentLoop(ScriptedEngine(renderer, []), None, system_prompt="", **bad)  # type: ignore[arg-type]


def test_tensors_have_their_types(renderer: ChatRenderer, tiny_world: Any, task: Task) -> None:
    done = run(renderer, tiny_world, task, [ANSWER])
    assert done.token_ids.dtype == done.step_ids.dtype == torch.long
    assert done.sampling_logprobs.dtype == torch.float32
