"""Tools for the tests of the executor."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from PIL import Image

from opensearch_lightning.tools import CallKey, ImageBook, ToolOutput
from opensearch_lightning.types import Action

KEY = CallKey(task_id="task", rollout=0, step=0)


def call(tool: str, **arguments: Any) -> Action:
    return Action(kind="tool_call", name=tool, arguments=arguments, well_formed=True)


def book(*images: Image.Image) -> ImageBook:
    images_book = ImageBook()
    for image in images or (Image.new("RGB", (100, 80), "red"),):
        images_book.add(image)
    return images_book


def schema(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


class FakeTool:
    """Counts its runs and how many went on at once; does what ``work`` says."""

    def __init__(
        self,
        work: Callable[[], Awaitable[ToolOutput]] | None = None,
        *,
        name: str = "fake",
        backend: str = "fakes",
        **properties: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.backend = backend
        self.schema = schema(name, **properties)
        self.runs = 0
        self.running = 0
        self.most_running = 0
        self._work = work

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        self.runs += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._work() if self._work is not None else ToolOutput(text="done")
        finally:
            self.running -= 1


class Heartbeat:
    """The longest time for which the event loop did not get to run."""

    async def __aenter__(self) -> "Heartbeat":
        self.longest_gap_s = 0.0
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            self.longest_gap_s = max(self.longest_gap_s, now - before)
            before = now
