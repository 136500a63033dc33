"""Blocking work off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0
_IDLE_SECONDS = 10.0

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own and wait for it without blocking the event loop.

    Cancelling the wait returns at once; the work goes on to its end, and what it made is dropped. Threads are as many
    as works run at once, and daemons: one stuck call neither takes a place from others nor keeps the process from
    ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except BaseException as error:
            # A future takes no StopIteration, and what would end a thread must not end the event loop.
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                failure = error
            else:
                failure = RuntimeError(repr(error))
        # The loop may have closed meanwhile: then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result, failure)

    _run_in_some_thread(body)
    return await future


class _Worker(threading.Thread):
    """A thread that waits for the next work a while after each: to start one takes longer than most works do."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="tool")
        self.works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                work = self.works.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    # It was taken at this moment: its work is on the way.
                    work = self.works.get()
                else:
                    return
            work()
            # What it holds is not to live on until the next one.
            del work
            _idle.append(self)


_idle: list[_Worker] = []
# A child has none of its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)


def _run_in_some_thread(work: Callable[[], None]) -> None:
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
    worker.works.put(work)


class LoopThread:
    """An event loop in a thread of its own, for work that outlives the caller's loop and must not stall it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="tool-loop")
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on that loop; cancelling the wait cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on that loop and block until it is done; not for coroutines of the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self, closing: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        """Cancel what still runs, close what is given, and end the thread. Blocks until it has ended."""
        asyncio.run_coroutine_threadsafe(_end(closing), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end(closing: Sequence[Callable[[], Awaitable[None]]]) -> None:
    await _cancel_others()
    for close in closing:
        try:
            async with asyncio.timeout(_CLOSING_SECONDS):
                await close()
        except Exception:
            # The others are still to be closed.
            logger.warning("A tool could not close its connections", exc_info=True)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    # A task that ignores its cancellation is left behind.
    if others:
        await asyncio.wait(others, timeout=1.0)
