"""Many more rollouts than places, slow tools, new weights and abandoned rollouts: nobody waits in vain."""

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from opensearch_lightning.errors import RolloutLost
from opensearch_lightning.rollout import Generation, SamplingParams, SessionKey, TransformersEngine
from tests.models.tiny import tiny_policy, tiny_processor

DEADLINE_S = 200.0


def states(engine: Any) -> str:
    """Where everything stands, for whoever has to find out why it stands still."""
    lines = [
        f"active {engine._active}, pending {len(engine._pending)}, closed {len(engine._closed)}, halted "
        f"{engine._halted}, awake {engine._wake.is_set()}, {engine.stats()}",
        f"server {engine._server}",
        f"slots {[sequence and sequence.key for sequence in engine._slots]}",
    ]
    lines += [
        f"{s.key}: slot {s.slot}, asking {s.asking}, pending {s in engine._pending}, cached {s.length}, fresh "
        f"{len(s.fresh)}, sampled {len(s.sampled)}, {s.future}, lost {s.lost!r}"
        for s in engine._open
    ]
    return "\n".join(lines)


def in_time(engine: TransformersEngine, work: Coroutine[Any, Any, None]) -> None:
    """Carry out ``work``; fails with the engine's state where it does not come to an end."""

    async def go() -> None:
        task = asyncio.create_task(work)
        done, _ = await asyncio.wait({task}, timeout=DEADLINE_S)
        if not done:
            text = states(engine)
            task.cancel()
            pytest.fail(f"not done after {DEADLINE_S} s\n{text}")
        await task

    asyncio.run(go())


class Crowd:
    """Rollouts of random length; ``turns`` keeps what each of those that were not abandoned was given."""

    def __init__(self, engine: TransformersEngine, seed: int, *, size: int = 36) -> None:
        self.engine, self.size = engine, size
        self.random = random.Random(seed)
        self.turns: dict[int, list[Generation]] = {}
        self.wanted: dict[int, int] = {}
        self.lost: list[int] = []

    async def one(self, number: int) -> None:
        rng, renderer = self.random, self.engine.renderer
        wanted = self.wanted[number] = rng.randint(1, 3)
        turns = []
        await asyncio.sleep(rng.random() * 0.1)
        try:
            async with self.engine.session(SessionKey(task_id=str(number // 4), rollout=number % 4)) as session:
                given = renderer.prompt("Search.", ["Which?"]).token_ids
                for step in range(wanted):
                    sampling = SamplingParams(max_turn_tokens=rng.randint(1, 5), seed=1)
                    turns.append(await session.generate(given, (), sampling, step))
                    await asyncio.sleep(rng.choice([0, rng.random() * 0.02]))
                    given = renderer.observation("found").token_ids
        except RolloutLost:
            self.lost.append(number)
        else:
            self.turns[number] = turns

    async def play(self, *, abandoned: int = 0) -> None:
        tasks = [asyncio.create_task(self.one(number)) for number in range(self.size)]
        victims = self.random.sample(tasks, abandoned)
        for victim in victims:
            await asyncio.sleep(self.random.random() * 0.05)
            victim.cancel()
        done, _ = await asyncio.wait(tasks)
        for task in done:
            if not task.cancelled():
                task.result()

    def check(self) -> None:
        """Each rollout that ended had all its turns."""
        assert all(len(turns) == self.wanted[number] for number, turns in self.turns.items())
        assert all(len(turn.token_ids) == len(turn.logprobs) > 0 for turns in self.turns.values() for turn in turns)


class Updates:
    """A thread that gives the engine new weights all the time."""

    def __init__(self, engine: TransformersEngine, policy: Any) -> None:
        self._engine, self._policy = engine, policy
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.number = 0

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.number += 1
            self._engine.update_weights(self._policy.named_parameters(), self.number)

    def __enter__(self) -> "Updates":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_policy()


@pytest.mark.parametrize(("evict_idle_s", "on_update"), [(0.0, "recompute"), (0.005, "keep")])
def test_a_crowd_comes_to_its_end_while_weights_change(policy: Any, evict_idle_s: float, on_update: Any) -> None:
    settings: dict[str, Any] = {"own_weights": True, "evict_idle_s": evict_idle_s, "on_update": on_update}
    engine = TransformersEngine(policy, tiny_processor(), max_sequences=4, max_length=256, **settings)
    crowd = Crowd(engine, seed=1)
    with Updates(engine, policy) as updates:
        in_time(engine, crowd.play(abandoned=8))
    crowd.check()
    assert len(crowd.turns) >= crowd.size - 8
    assert not crowd.lost
    versions = [version for turns in crowd.turns.values() for turn in turns for version in turn.weight_versions]
    assert len(set(versions)) > 2
    assert max(versions) <= updates.number


def test_a_crowd_comes_to_its_end_among_batches_that_fail(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(policy, tiny_processor(), max_sequences=4, max_length=256, evict_idle_s=0.0)
    crowd, forward, calls = Crowd(engine, seed=2), engine._forward, iter(range(10**6))

    def failing(*args: Any) -> Any:
        if next(calls) % 20 == 19:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine, "_forward", failing)
    in_time(engine, crowd.play(abandoned=4))
    crowd.check()
    assert crowd.lost
    assert crowd.turns
    assert len(crowd.turns) + len(crowd.lost) >= crowd.size - 4


def test_a_crowd_in_lockstep_comes_to_its_end(policy: Any) -> None:
    engine = TransformersEngine(policy, tiny_processor(), max_sequences=4, max_length=256, reproducible=True)
    crowd = Crowd(engine, seed=3)
    in_time(engine, crowd.play(abandoned=4))
    crowd.check()
    assert len(crowd.turns) >= crowd.size - 4


async def long_turn(engine: TransformersEngine, name: str, tokens: int = 200) -> None:
    async with engine.session(SessionKey(task_id=name, rollout=0)) as session:
        given = engine.renderer.prompt("Search.", ["Which?"]).token_ids
        await session.generate(given, (), SamplingParams(max_turn_tokens=tokens), 0)


async def sampling_began(engine: TransformersEngine) -> None:
    while engine.stats().sampled_tokens == 0:  # noqa: ASYNC110 (no event tells of single tokens)
        await asyncio.sleep(0.001)


def test_nothing_runs_on_the_model_once_its_last_rollout_is_abandoned(policy: Any) -> None:
    engine = TransformersEngine(policy, tiny_processor(), max_length=512)
    policy.train()

    async def go() -> None:
        rollout = asyncio.create_task(long_turn(engine, "a"))
        await sampling_began(engine)
        assert not policy.training
        rollout.cancel()
        await asyncio.wait({rollout})
        # the caller may train at once
        assert policy.training

    in_time(engine, go())
    policy.eval()


def test_an_abandoned_rollout_waits_for_none_that_began_later(policy: Any) -> None:
    engine = TransformersEngine(policy, tiny_processor(), max_length=512)
    left = asyncio.Event()

    async def later() -> None:
        async with engine.session(SessionKey(task_id="b", rollout=0)):
            await left.wait()

    async def go() -> None:
        first = asyncio.create_task(long_turn(engine, "a"))
        await sampling_began(engine)
        first.cancel()
        await asyncio.sleep(0)
        second = asyncio.create_task(later())
        await asyncio.wait({first})
        left.set()
        await second

    in_time(engine, go())


def test_rollouts_are_told_when_the_server_breaks(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(policy, tiny_processor(), max_length=512)

    async def go() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_ready", lambda: 1 / 0)
            with pytest.raises(RolloutLost, match="ZeroDivisionError"):
                await long_turn(engine, "a")
        await long_turn(engine, "b", tokens=2)

    in_time(engine, go())
