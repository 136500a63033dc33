"""What stands under examples/ works as its README says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.composition import compose_config, make
from opensearch_lightning.tools import CallKey, ImageBook, ToolExecutor
from opensearch_lightning.types import Action, ErrorKind, ToolResult

EXAMPLES = Path(__file__).parents[1] / "examples"


def executor_with(root: Path, *overrides: str) -> ToolExecutor:
    """The executor of the offline tools, and what the overrides add."""
    node = compose_config(["tools=offline", f"data_dir={root}", *overrides])["tools"]["executor"]
    return make("tools.executor", node, {})


async def ask(executor: ToolExecutor, name: str, **arguments: Any) -> ToolResult:
    action = Action(kind="tool_call", name=name, arguments=arguments, well_formed=True)
    return await executor.execute(action, ImageBook(), CallKey(task_id="task", rollout=0, step=0))


async def test_own_tool(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_tool"))
    executor = executor_with(tiny["root"], "+tools.executor.tools.convert._target_=unit_converter.UnitConverter")
    assert len(executor.schemas) == 8
    assert (await ask(executor, "convert", value=26, unit="mi", to="km")).text == "26 mi = 41.8429 km"
    mixed = await ask(executor, "convert", value=1, unit="kg", to="km")
    assert mixed.text == "Error: invalid_argument. kg and km measure different things."
    assert (await ask(executor, "convert", value="26", unit="mi", to="km")).error is ErrorKind.INVALID_ARGUMENT
    assert (await ask(executor, "convert", value=1, unit="league", to="km")).error is ErrorKind.INVALID_ARGUMENT
    await executor.aclose()


async def test_mcp_server(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    # as in an activated environment
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    mount = (
        "{_target_:opensearch_lightning.tools.mcp_tools,command:[python,examples/mcp_tool/server.py],prefix:calendar_}"
    )
    executor = executor_with(tiny["root"], f"+tools.executor.tools.calendar={mount}")
    names = [schema["function"]["name"] for schema in executor.schemas]
    assert names[7:] == ["calendar_days_between", "calendar_weekday"]
    assert (await ask(executor, "calendar_days_between", start="2024-02-01", end="2024-03-01")).text == "29"
    assert (await ask(executor, "calendar_weekday", day="2024-02-29")).text == "Thursday"
    assert (await ask(executor, "calendar_weekday", day="today")).error is ErrorKind.BACKEND_ERROR
    await executor.aclose()
