"""The scripted expert: right answers by real calls, and what it does after errors."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.rewards import ExactMatchJudge
from opensearch_lightning.tools import FaultInjector, Outage, ToolExecutor, offline_tools
from opensearch_lightning.world import World, build_world
from opensearch_lightning.world.expert import ExpertStatistics, ScriptedExpert


@pytest.fixture(scope="module")
def labelled_world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("labelled") / "world"
    build_world(folder, pages=40, seed=0, splits={"sft": 6}, pictures={"labelled": 1.0}, workers=1)
    return World.open(folder)


def collect(
    world: Any, *, outages: dict[str, Outage] | None = None, detour: float = 0.0, habit: float = 0.7, **rates: float
) -> tuple[list[dict[str, Any]], ExpertStatistics]:
    async def run() -> tuple[list[dict[str, Any]], ExpertStatistics]:
        tools = offline_tools(world, text_top_k=1, image_top_k=1)
        executor = ToolExecutor(tools, timeout_s=30, faults=FaultInjector(0, rates, outages))
        expert = ScriptedExpert(executor, ExactMatchJudge(), system_prompt="Search.", detour=detour, habit=habit)
        try:
            return await expert.collect(world.tasks("sft"))
        finally:
            await executor.aclose()

    return asyncio.run(run())


def said(row: dict[str, Any]) -> list[str]:
    return [turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"]


def tool_call(turn: dict[str, str]) -> str:
    return re.findall("<tool_call>(.*?)</tool_call>", turn["value"], re.DOTALL)[0]


def thoughts(row: dict[str, Any]) -> list[str]:
    return [re.findall("<think>(.*?)</think>", text)[0] for text in said(row)]


def test_expert_solves_every_task_when_nothing_fails(tiny_world: Any) -> None:
    rows, statistics = collect(tiny_world)
    assert statistics == ExpertStatistics(tried=12, kept=12, dropped={})
    for row, task in zip(rows, tiny_world.tasks("sft"), strict=True):
        plan = [*task.metadata["relations"], task.metadata["attribute"]]
        assert thoughts(row) == [", ".join(plan), *plan, "answer"]
        assert said(row)[-1].endswith(f"<response>{task.answer}</response>")


@pytest.mark.parametrize(("detour", "other"), [(0.0, False), (1.0, True)])
def test_expert_goes_on_after_an_error(tiny_world: Any, detour: float, other: bool) -> None:
    rows, statistics = collect(tiny_world, detour=detour, timeout=0.3)
    failed = 0
    for row in rows:
        turns = row["conversations"][1:]
        for call, result, following in zip(turns[::2], turns[1::2], turns[2::2], strict=False):
            if result["value"].startswith("Error: timeout") and not call["value"].startswith("<think>wait"):
                failed += 1
                assert following["value"].startswith("<think>wait") is other
                assert (tool_call(following) == tool_call(call)) is not other
    assert failed > 5
    assert statistics.kept == len(rows) == 12 - sum(statistics.dropped.values())


def test_episodes_lost_to_errors_are_counted(tiny_world: Any) -> None:
    rows, statistics = collect(tiny_world, timeout=1.0)
    assert rows == []
    assert statistics == ExpertStatistics(tried=12, kept=0, dropped={"fatal errors": 12})


@pytest.mark.parametrize(
    ("habit", "detour", "first", "second"),
    [
        (1.0, 0.0, "image_search", "image_search"),
        (1.0, 1.0, "image_search", "layout_parsing"),
        (0.0, 0.0, "layout_parsing", None),
    ],
)
def test_expert_has_two_ways_to_a_labelled_picture(
    labelled_world: Any, habit: float, detour: float, first: str, second: str | None
) -> None:
    down = {"image_search": Outage(rate=1.0, min_steps=1, max_steps=1)}
    rows, _ = collect(labelled_world, habit=habit, detour=detour, outages=down)
    assert len(rows) == 6
    for row in rows:
        tools = [json.loads(tool_call(turn))["name"] for turn in row["conversations"][1:-2:2]]
        assert tools[0] == first
        assert tools[1] == (second or "text_search")
