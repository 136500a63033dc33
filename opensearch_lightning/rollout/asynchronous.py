"""Rollouts in a thread of their own, while the policy is trained in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from opensearch_lightning.errors import ConfigurationError, RolloutLost
from opensearch_lightning.rollout.replay_buffer import PendingGroup, ReplayBuffer, Taken

if TYPE_CHECKING:
    from opensearch_lightning.rollout.agent_loop import AgentLoop
    from opensearch_lightning.rollout.protocol import SamplingParams

T = TypeVar("T")


class AsyncRollouts:
    """Rolls out submitted tasks on an event loop in its own thread; finished groups wait in ``buffer``.

    Rollouts start in order of submission, and each one that ends makes room for the next, whatever the others do.

    Args:
        agent: makes the trajectories; its engine must allow ``live_updates``.
        buffer: where groups wait.
        group_size: trajectories of a task.
        sampling: of every turn.
        max_parallel: rollouts at once; further ones wait for a place.

    Raises:
        ConfigurationError: ``max_parallel`` below 1.
    """

    def __init__(
        self, agent: AgentLoop, buffer: ReplayBuffer, *, group_size: int, sampling: SamplingParams, max_parallel: int
    ) -> None:
        if max_parallel < 1:
            raise ConfigurationError(f"max_parallel_rollouts is {max_parallel}; set at least 1")
        self.buffer = buffer
        self._agent = agent
        self._group_size = group_size
        self._sampling = sampling
        self._max_parallel = max_parallel
        self._making: dict[PendingGroup, asyncio.Task[None]] = {}
        self._unwanted: set[PendingGroup] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_to_stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started.wait()

    def submit(self, pending: PendingGroup) -> None:
        """Roll out ``pending.task``; rollouts are numbered by its place in the data's order."""
        self.buffer.add(pending)
        self._running_loop().call_soon_threadsafe(self._begin, pending)

    def take(self, *, version: int, size: int) -> Taken:
        """See :meth:`ReplayBuffer.take`; what is dropped is stopped."""
        taken = self.buffer.take(version=version, size=size)
        for pending in taken.dropped:
            self._running_loop().call_soon_threadsafe(self._cancel, pending)
        return taken

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out ``work`` on the loop of the rollouts, beside them; blocks until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._running_loop()).result()

    def stop(self) -> None:
        """Cancel what runs, close its sessions and end the thread; a second call does nothing."""
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked_to_stop.set)
            self._thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        self.buffer.check()
        assert self._loop is not None, "start() comes first"
        return self._loop

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.buffer.fail(error)
        finally:
            # whoever waits for groups, now or later, waits in vain
            self.buffer.fail(RolloutLost("the thread of the rollouts has ended, and no group comes any more"))
            self._started.set()

    async def _serve(self) -> None:
        self._places = asyncio.Semaphore(self._max_parallel)
        self._loop = asyncio.get_running_loop()
        self._started.set()
        await self._asked_to_stop.wait()
        making = list(self._making.items())
        for pending, _ in making:
            self._cancel(pending)
        await asyncio.gather(*(task for _, task in making), return_exceptions=True)

    def _begin(self, pending: PendingGroup) -> None:
        task = asyncio.get_running_loop().create_task(self._make(pending))
        self._making[pending] = task
        task.add_done_callback(lambda _: self._forget(pending))

    def _forget(self, pending: PendingGroup) -> None:
        del self._making[pending]
        self._unwanted.discard(pending)

    def _cancel(self, pending: PendingGroup) -> None:
        if pending in self._making:
            self._unwanted.add(pending)
            self._making[pending].cancel()

    async def _make(self, pending: PendingGroup) -> None:
        try:
            group = await self._agent.run_group(
                pending.task,
                self._group_size,
                self._sampling,
                first_rollout=pending.place[0] * self._group_size,
                place=_Place(self, pending),
            )
        except asyncio.CancelledError:
            if pending not in self._unwanted:
                # a tool or judge cancelled itself: nobody else would tell the thread that waits for the group
                self.buffer.fail(RolloutLost(f"the rollouts of task {pending.task.id} were cancelled from within"))
            raise
        except Exception as error:  # it belongs to the thread that takes groups
            self.buffer.fail(error)
        else:
            self.buffer.complete(pending, group)


class _Place:
    """A place among the rollouts that run at once, which notes when the first rollout of a group gets one."""

    def __init__(self, rollouts: AsyncRollouts, pending: PendingGroup) -> None:
        self._rollouts = rollouts
        self._pending = pending

    async def __aenter__(self) -> None:
        await self._rollouts._places.acquire()
        self._rollouts.buffer.begin(self._pending, self._rollouts._agent.engine.weight_version)

    async def __aexit__(self, *_: object) -> None:
        self._rollouts._places.release()
