import random
import threading
from typing import Any

import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rollout import PendingGroup, ReplayBuffer, TaskLedger
from opensearch_lightning.rollout.replay_buffer import choose
from opensearch_lightning.types import Task, TrajectoryGroup


def pending(number: int, begun: int | None, *, ready: bool) -> PendingGroup:
    task = Task(id=str(number), question="", answer="", images=())
    group = TrajectoryGroup(task=task, trajectories=()) if ready else None
    return PendingGroup(place=(number, 0), task=task, begun=begun, group=group)


def numbers(chosen: Any) -> list[int] | None:
    return None if chosen is None else [item.place[0] for item in chosen]


def test_what_is_ready_goes_in_order_of_submission() -> None:
    groups = [pending(i, 0, ready=i in (1, 2, 3)) for i in range(4)]
    assert numbers(choose(groups, version=0, size=2, max_staleness=1)) == [1, 2]


def test_a_step_waits_for_what_would_grow_too_old() -> None:
    groups = [pending(0, 0, ready=False), pending(1, 0, ready=True), pending(2, 1, ready=True)]
    assert choose(groups, version=1, size=2, max_staleness=1) is None
    groups[0].group = groups[1].group
    # 1 is as old as 0 and 2 is not: both old ones go
    assert numbers(choose(groups, version=1, size=2, max_staleness=1)) == [0, 1]


def test_a_step_takes_what_later_ones_would_have_no_room_for() -> None:
    # at version 1 two of the three groups of version 0 can still go in step 2: one has to go now
    groups = [pending(0, 1, ready=True), pending(1, 1, ready=True), *(pending(i, 0, ready=i == 4) for i in (2, 3, 4))]
    assert numbers(choose(groups, version=1, size=2, max_staleness=2)) == [4, 0]
    groups[4].group = None
    assert choose(groups, version=1, size=2, max_staleness=2) is None


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_trained_once_and_in_time(max_staleness: int, seed: int) -> None:
    rng, size, steps = random.Random(seed), 3, 40
    submitted: list[PendingGroup] = []
    trained: list[int] = []
    for version in range(steps):
        while len(submitted) < size * min(max_staleness + 1, steps - version):
            number = len(trained) + len(submitted)
            # some wait for a place and begin under later weights
            submitted.append(pending(number, version if rng.random() < 0.8 else None, ready=False))
        while (chosen := choose(submitted, version=version, size=size, max_staleness=max_staleness)) is None:
            late = rng.choice([item for item in submitted if item.group is None])
            late.begun = version if late.begun is None else late.begun
            late.group = TrajectoryGroup(task=late.task, trajectories=())
        assert len(chosen) == size
        assert all(version - (item.begun or 0) <= max_staleness for item in chosen)
        trained += [item.place[0] for item in chosen]
        submitted = [item for item in submitted if item not in chosen]
    assert sorted(trained) == list(range(size * steps))


def test_what_is_too_old_is_dropped_where_that_is_wished() -> None:
    buffer = ReplayBuffer(max_staleness=1, on_stale="drop")
    groups = [
        pending(0, 0, ready=False),
        pending(1, 0, ready=True),
        pending(2, 1, ready=True),
        pending(3, 1, ready=False),
    ]
    for group in groups:
        buffer.add(group)
    taken = buffer.take(version=1, size=2)
    assert numbers(taken.chosen) == [1, 2]
    assert numbers(taken.dropped) == [0]
    assert len(buffer) == 1


def test_taking_waits_and_hears_of_errors() -> None:
    buffer = ReplayBuffer(max_staleness=1)
    late = pending(0, 0, ready=False)
    buffer.add(late)
    timer = threading.Timer(0.05, buffer.complete, (late, TrajectoryGroup(task=late.task, trajectories=())))
    timer.start()
    assert numbers(buffer.take(version=0, size=1).chosen) == [0]
    buffer.add(pending(1, 0, ready=False))
    threading.Timer(0.05, buffer.fail, (ValueError("broken"),)).start()
    with pytest.raises(ValueError, match="broken"):
        buffer.take(version=0, size=1)


@pytest.mark.parametrize(
    ("bad", "named"), [({"max_staleness": -1}, "-1"), ({"max_staleness": 1, "on_stale": "x"}, "x")]
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ReplayBuffer(**bad)


def test_a_ledger_comes_back_from_its_state() -> None:
    ledger = TaskLedger(3)
    handed_out = [ledger.hand_out(2) for _ in range(5)]
    assert handed_out == [(3, 0), (3, 1), (4, 0), (4, 1), (5, 0)]
    ledger.settle([(3, 1)])
    again = TaskLedger.from_state(ledger.state([(4, 0)]))
    assert again.open == [(3, 0), (4, 1), (5, 0)]
    assert again.hand_out(2) == (5, 1)
    assert ledger.open == [(3, 0), (4, 0), (4, 1), (5, 0)]
