"""Equal work asked for at the same time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Lets callers with equal keys share one run, its result or its error; for one event loop.

    The run is cancelled when the last of them was.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[asyncio.Task[T], list[None]]] = {}

    async def join(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """``(result, shared)``: ``shared`` when another caller had started the run."""
        shared = key in self._running
        if not shared:
            started = asyncio.create_task(start())
            self._running[key] = (started, [])
            started.add_done_callback(lambda task: self._end(key, task))
        task, waiting = self._running[key]
        waiting.append(None)
        try:
            return await asyncio.shield(task), shared
        finally:
            waiting.pop()
            if not waiting and not task.done():
                self._end(key, task)
                task.cancel()

    def _end(self, key: str, task: asyncio.Task[T]) -> None:
        # A cancelled run ends later than a new one of its key may start.
        if key in self._running and self._running[key][0] is task:
            del self._running[key]
        if task.done() and not task.cancelled():
            task.exception()  # seen, also when nobody waits any more
