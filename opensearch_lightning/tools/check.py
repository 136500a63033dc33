"""Tries each tool's services once, before a run depends on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from PIL import Image, ImageDraw

from opensearch_lightning.errors import ToolError, one_line
from opensearch_lightning.tools.arguments import check_arguments
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.protocol import ClosableTool, ProbedTool, Tool
from opensearch_lightning.types import ErrorKind

SAMPLE_CALLS: Mapping[str, Mapping[str, Any]] = {
    "text_search": {"q": "capital of France", "top_k": 1},
    "image_search": {"url": "img_1", "top_k": 1},
    "layout_parsing": {"image": "img_1"},
    "crop": {"image": "img_1", "x": 10, "y": 10, "width": 50, "height": 50},
    "sharpen": {"image": "img_1"},
    "super_resolution": {"image": "img_1"},
    "perspective_correct": {"image": "img_1"},
}
"""By wire name, the call that tries a tool which has no tries of its own."""

Attempt = Callable[[], Awaitable[str | None]]
"""A try that may say in a note where the tool fell back."""

_UNREACHABLE = {ErrorKind.TIMEOUT, ErrorKind.UNREACHABLE}


class Status(StrEnum):
    """How a try went."""

    WORKS = "works"
    SLOW = "slow"
    MISSING_KEY = "missing key"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One try: ``seconds`` it took, ``None`` where none was made; ``detail`` is one line."""

    tool: str
    service: str
    status: Status
    seconds: float | None = None
    detail: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether a run would suffer."""
        return self.status in (Status.MISSING_KEY, Status.UNREACHABLE, Status.FAILED)


async def check_tools(tools: Iterable[Tool], *, timeout_s: float = 30.0, slow_s: float = 5.0) -> list[Check]:
    """Try every service of every tool, all at once, and close the tools.

    Args:
        tools: any tools; one without tries of its own and not among :data:`SAMPLE_CALLS` is not tried.
        timeout_s: seconds after which a service counts as unreachable.
        slow_s: seconds above which one that works counts as slow.
    """
    tools = list(tools)
    found: dict[tuple[str, str], tuple[str, str, Attempt | None]] = {}
    for tool in tools:
        for service, probe in _probes_of(tool).items():
            # The tools of one server have the same tries: one is enough.
            owner = tool.backend if isinstance(tool, ProbedTool) else tool.name
            found.setdefault((owner, service), (tool.name, service, probe))
    checks = await asyncio.gather(*(_try(*one, timeout_s, slow_s) for one in found.values()))
    closing = [asyncio.ensure_future(_quiet(tool.aclose)) for tool in tools if isinstance(tool, ClosableTool)]
    if closing:
        await asyncio.wait(closing, timeout=timeout_s)
    return checks


def _probes_of(tool: Tool) -> Mapping[str, Attempt | None]:
    try:
        return dict(_probes(tool))
    except Exception as error:
        # what a tool of the user's does wrong is what the table is for
        reason = f"its probes() failed: {type(error).__name__}: {error}"

        async def fail() -> str | None:
            raise RuntimeError(reason)

        return {tool.backend: fail}


async def _quiet(work: Attempt | Callable[[], Awaitable[None]]) -> str | None:
    """What ``work`` comes to; what would end the loop or the task is an error like any other."""
    try:
        return await work()
    except (KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:
        raise RuntimeError(repr(error)) from error


def _probes(tool: Tool) -> Mapping[str, Attempt | None]:
    if isinstance(tool, ProbedTool):
        return tool.probes()
    if tool.name not in SAMPLE_CALLS:
        return {tool.backend: None}
    return {tool.backend: partial(_sample_call, tool)}


async def _sample_call(tool: Tool) -> str | None:
    """The note of what came of it, which says where the tool fell back."""
    images = ImageBook()
    picture = Image.new("RGB", (240, 80), "white")
    ImageDraw.Draw(picture).text((20, 20), "OpenSearch", fill="black", font_size=32)
    images.add(picture)
    arguments = check_arguments(tool.schema, SAMPLE_CALLS[tool.name], {}, images)
    return (await tool.run(arguments.values, images)).note


async def _try(tool: str, service: str, probe: Attempt | None, timeout_s: float, slow_s: float) -> Check:
    if probe is None:
        return Check(tool=tool, service=service, status=Status.NOT_TRIED, detail="it has no probes()")
    started = time.perf_counter()
    try:
        # Not awaited itself: one that ignores its cancellation holds up nothing.
        trying = asyncio.ensure_future(_quiet(probe))
        done, _ = await asyncio.wait({trying}, timeout=timeout_s)
        trying.cancel()
        note = trying.result() if done else None
    except ToolError as error:
        status = Status.UNREACHABLE if error.kind in _UNREACHABLE else Status.FAILED
        detail = f"{error.kind}: {error.message}"
    except Exception as error:
        # whatever a tool of the user's raises is what the table is for
        status, detail = Status.FAILED, f"{type(error).__name__}: {error}"
    else:
        slow = time.perf_counter() - started > slow_s
        status, detail = Status.SLOW if slow else Status.WORKS, note or ""
        if not done:
            status, detail = Status.UNREACHABLE, f"no answer in {timeout_s:g} s"
    seconds = time.perf_counter() - started
    return Check(tool=tool, service=service, status=status, seconds=seconds, detail=one_line(detail))


def render(checks: Sequence[Check]) -> str:
    """A table, one try a line."""
    head = ("tool", "service", "status", "seconds", "detail")
    rows = [
        (check.tool, check.service, check.status, "" if check.seconds is None else f"{check.seconds:.2f}", check.detail)
        for check in checks
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in [head, *rows]
    )
