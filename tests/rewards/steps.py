"""Short ways to write steps and trajectories."""

from typing import Any

import torch

from opensearch_lightning.types import (
    NON_FATAL,
    Action,
    ErrorKind,
    Step,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
)

TASK = Task(id="t", question="Who is the mayor of Velmora?", answer="Ada Quist", images=())


def call(name: str = "text_search", *, well_formed: bool = True, error: ErrorKind | None = None, **result: Any) -> Step:
    """A step that called ``name``; its ``arguments`` and the fields of its result by keyword."""
    arguments = result.pop("arguments", {"q": "Velmora"})
    action = Action(kind="tool_call", name=name, arguments=arguments, well_formed=well_formed)
    result = {"tool": name, "text": "", "hits": None, **result}
    return Step(index=0, text="", action=action, result=ToolResult(error=error, **result))


def answer(text: str = "Ada Quist", *, well_formed: bool = True) -> Step:
    """A step that responded."""
    return Step(index=0, text="", action=Action(kind="response", response=text, well_formed=well_formed))


def unreadable() -> Step:
    """A step without a readable action, and the error it got."""
    kind = ErrorKind.NO_ACTION
    return Step(
        index=0,
        text="",
        action=Action(kind="error", error=kind),
        result=ToolResult(tool=None, text="Error.", error=kind),
    )


def trajectory(*steps: Step, fatal_step: int = NON_FATAL, is_fatal: bool | None = None) -> Trajectory:
    """A trajectory of steps, numbered in order."""
    numbered = tuple(
        Step(index=i, text=step.text, action=step.action, result=step.result) for i, step in enumerate(steps)
    )
    responded = bool(numbered) and numbered[-1].action.kind == "response"
    return Trajectory(
        task_id=TASK.id,
        rollout=0,
        steps=numbered,
        images=(),
        token_ids=torch.zeros(0, dtype=torch.long),
        step_ids=torch.zeros(0, dtype=torch.long),
        sampling_logprobs=torch.zeros(0),
        stop_reason=StopReason.RESPONSE if responded else StopReason.FATAL_ERRORS,
        fatal_step=fatal_step,
        is_fatal=fatal_step < NON_FATAL if is_fatal is None else is_fatal,
    )
