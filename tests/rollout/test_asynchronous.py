"""The thread of the rollouts, and who waits for it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from opensearch_lightning.errors import RolloutLost
from opensearch_lightning.rollout import AgentLoop, AsyncRollouts, PendingGroup, ReplayBuffer, SamplingParams, Taken
from opensearch_lightning.rollout import SessionKey as Key
from opensearch_lightning.tools import ToolExecutor
from opensearch_lightning.types import TrajectoryGroup
from tests.callbacks.test_async_rollouts import LiveEngine, Wait, no_rollout_thread
from tests.data.rows import task
from tests.tools.fakes import FakeTool

PATIENCE_S = 100.0


def pending(number: int) -> PendingGroup:
    return PendingGroup(place=(number, 0), task=task(number))


def started(wait: Wait) -> AsyncRollouts:
    loop = AgentLoop(LiveEngine(wait), ToolExecutor([FakeTool()]), system_prompt="", render_tools=False)
    settings: dict[str, Any] = {"group_size": 2, "sampling": SamplingParams(), "max_parallel": 4}
    rollouts = AsyncRollouts(loop, ReplayBuffer(max_staleness=1), **settings)
    rollouts.start()
    return rollouts


def taken(rollouts: AsyncRollouts, size: int) -> Taken | BaseException:
    """What a step takes or what it raises; fails where it waits in vain."""
    outcome: list[Taken | BaseException] = []

    def take() -> None:
        try:
            outcome.append(rollouts.take(version=0, size=size))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert outcome, "the step waits for a group that will not come"
    return outcome[0]


async def endless(key: Key) -> None:
    await asyncio.sleep(3600)


def test_a_step_takes_what_the_thread_has_made() -> None:
    rollouts = started(lambda key: asyncio.sleep(0))
    for number in range(3):
        rollouts.submit(pending(number))
    outcome = taken(rollouts, 3)
    assert isinstance(outcome, Taken)
    assert [item.task.id for item in outcome.chosen] == [task(number).id for number in range(3)]
    rollouts.stop()
    assert no_rollout_thread()


@pytest.mark.parametrize(
    ("end", "message"),
    [(lambda rollouts: rollouts.stop(), "has ended"), (lambda rollouts: rollouts._loop.stop(), "Event loop stopped")],
    ids=["stopped", "dead"],
)
def test_a_step_does_not_wait_for_a_thread_that_has_ended(end: Callable[[Any], None], message: str) -> None:
    rollouts = started(endless)
    rollouts.submit(pending(0))
    loop = rollouts._loop
    assert loop is not None
    if message == "has ended":
        threading.Timer(0.1, end, (rollouts,)).start()
    else:
        loop.call_soon_threadsafe(end, rollouts)
    outcome = taken(rollouts, 1)
    assert isinstance(outcome, RolloutLost | RuntimeError)
    assert message in str(outcome)
    # and neither does what comes later
    with pytest.raises(type(outcome), match=message):
        rollouts.submit(pending(1))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)], ids=["cancelled", "exit"])
def test_a_step_hears_of_rollouts_that_end_without_an_error(error: BaseException) -> None:
    async def wait(key: Key) -> None:
        if key.rollout == 1:
            raise error
        await asyncio.sleep(3600)

    rollouts = started(wait)
    rollouts.submit(pending(0))
    outcome = taken(rollouts, 1)
    if isinstance(error, SystemExit):
        assert outcome is error
    else:
        assert isinstance(outcome, RolloutLost)
        assert "cancelled from within" in str(outcome)
    rollouts.stop()


def test_a_step_that_waits_looks_once_for_each_group() -> None:
    class Counting(ReplayBuffer):
        looks = 0

        def check(self) -> None:
            self.looks += 1
            super().check()

    buffer = Counting(max_staleness=1)
    groups = [pending(number) for number in range(3)]
    for number, group in enumerate(groups):
        buffer.add(group)
        made = TrajectoryGroup(task=group.task, trajectories=())
        threading.Timer(0.1 * (number + 1), buffer.complete, (group, made)).start()
    assert len(buffer.take(version=0, size=3).chosen) == 3
    assert 1 <= buffer.looks <= 1 + len(groups)
