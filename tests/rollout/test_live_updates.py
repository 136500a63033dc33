"""New weights while rollouts run, and places that idle rollouts give up."""

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from opensearch_lightning.chat import TokenizedSample, collate
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import load_policy, load_processor, policy_logprobs
from opensearch_lightning.rollout import SamplingParams, SessionKey, TransformersEngine
from tests.rollout.test_transformers_engine import picture


@pytest.fixture(scope="module")
def policies(tiny_model_dir: Path) -> tuple[Any, Any]:
    """Two policies that differ."""
    old, new = load_policy(tiny_model_dir), load_policy(tiny_model_dir)
    with torch.no_grad():
        for one, other in zip(old.parameters(), new.parameters(), strict=True):
            one.mul_(1.5)
            other.mul_(1.3)
    return old, new


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Any:
    return load_processor(tiny_model_dir)


class Run:
    """One rollout of two turns; keeps tokens, their log-probabilities and the weights that each came from."""

    def __init__(self, engine: TransformersEngine, number: int) -> None:
        self.engine, self.number = engine, number
        self.ids: list[int] = []
        self.steps: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.images: list[Any] = []

    async def play(self, turn_tokens: int, before_second: Any) -> None:
        renderer = self.engine.renderer
        async with self.engine.session(SessionKey(task_id=str(self.number), rollout=0)) as session:
            given = renderer.prompt("Search.", [picture(self.number), "What is it?"])
            for step in range(2):
                sampling = SamplingParams(temperature=0.7, max_turn_tokens=turn_tokens, seed=3)
                turn = await session.generate(given.token_ids, given.images, sampling, step)
                n_given, n_sampled = len(given.token_ids), len(turn.token_ids)
                self.ids += [*given.token_ids, *turn.token_ids]
                self.steps += [-1] * n_given + [step] * n_sampled
                self.logprobs += [0.0] * n_given + turn.logprobs
                self.versions += [-1] * n_given + turn.weight_versions
                self.images += given.images
                if step == 0:
                    await before_second()
                given = renderer.observation("found", [picture(9)], first_image=2)

    def difference(self, policy: Any, version: int) -> float:
        """Largest difference to the log-probabilities of ``policy`` over the tokens of ``version``; 0 of none."""
        sample = TokenizedSample(
            token_ids=torch.tensor(self.ids), step_ids=torch.tensor(self.steps), images=tuple(self.images)
        )
        renderer = self.engine.renderer
        sizes = {"image_token_id": renderer.image_token_id, "merge_size": renderer.merge_size}
        batch = collate([sample], pad_id=renderer.pad_id, **sizes)
        with torch.no_grad():
            expected, _ = policy_logprobs(policy, batch, batch.step_ids >= 0, temperature=0.7)
        there = torch.tensor(self.versions) == version
        return float((expected[0] - torch.tensor(self.logprobs))[there].abs().max()) if bool(there.any()) else 0.0


def update_in_the_middle(engine: TransformersEngine, new: Any) -> list[Run]:
    """Six rollouts in whose first turn the weights change; a seventh waits for its tool then."""

    async def go() -> list[Run]:
        updated = asyncio.Event()
        runs = [Run(engine, number) for number in range(6)]
        playing = [asyncio.create_task(run.play(60, updated.wait)) for run in runs]
        idle = Run(engine, 6)
        playing.append(asyncio.create_task(idle.play(2, updated.wait)))
        while engine.stats().sampled_tokens < 60:  # noqa: ASYNC110 (no event tells of single tokens)
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.update_weights, new.named_parameters(), 1)
        updated.set()
        await asyncio.gather(*playing)
        return [*runs, idle]

    return asyncio.run(asyncio.wait_for(go(), 200))


def test_each_token_has_the_logprob_of_the_weights_that_sampled_it(policies: tuple[Any, Any], processor: Any) -> None:
    old, new = policies
    engine = TransformersEngine(old, processor, own_weights=True)
    before = [p.detach().clone() for p in old.parameters()]
    runs = update_in_the_middle(engine, new)
    first_turns = [[v for v, step in zip(run.versions, run.steps, strict=True) if step == 0] for run in runs]
    assert sum(set(turn) == {0, 1} for turn in first_turns) >= 2, "no turn spans the update"
    assert set(first_turns[-1]) == {0}
    assert all(turn == sorted(turn) for turn in first_turns)
    for run in runs:
        assert run.difference(old, 0) < 1e-5
        assert run.difference(new, 1) < 1e-5
    # the policy that is trained is not touched
    assert all(torch.equal(one, other) for one, other in zip(before, old.parameters(), strict=True))
    assert engine.weight_version == 1


def test_kept_caches_are_those_of_the_old_weights(policies: tuple[Any, Any], processor: Any) -> None:
    old, new = policies
    engine = TransformersEngine(old, processor, own_weights=True, on_update="keep")
    runs = update_in_the_middle(engine, new)
    assert all(run.difference(old, 0) < 1e-5 for run in runs)
    assert max(run.difference(new, 1) for run in runs) > 1e-3


def test_an_idle_rollout_gives_up_its_place_to_one_that_waits(policies: tuple[Any, Any], processor: Any) -> None:
    old, _ = policies
    engine = TransformersEngine(old, processor, max_sequences=2, evict_idle_s=0)

    async def go() -> list[Run]:
        result = asyncio.Event()
        slow = [Run(engine, number) for number in range(2)]
        waiting = [asyncio.create_task(run.play(6, result.wait)) for run in slow]
        while not all(run.ids for run in slow):  # noqa: ASYNC110 (the runs know no event)
            await asyncio.sleep(0.001)
        quick = [Run(engine, number) for number in range(2, 5)]
        await asyncio.gather(*(run.play(6, lambda: asyncio.sleep(0)) for run in quick))
        result.set()
        await asyncio.gather(*waiting)
        return slow + quick

    for run in asyncio.run(asyncio.wait_for(go(), 100)):
        assert len(set(run.steps)) == 3
        assert run.difference(old, 0) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_taken_over_while_they_are_good(policies: tuple[Any, Any], processor: Any, dtype: Any) -> None:
    trained = deepcopy(policies[0])
    engine = TransformersEngine(trained, processor, own_weights=True)
    # as a trainer does that converts its policy after the engine was made
    trained.to(dtype)
    new = {name: weight.detach() * 2 for name, weight in trained.named_parameters()}

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in new.items():
            whole = weight.clone()
            yield name, whole
            whole.fill_(float("nan"))

    engine.update_weights(gathered(), 1)
    copies = dict(engine.policy.named_parameters())
    assert all(copies[name].dtype == dtype and torch.equal(copies[name], weight) for name, weight in new.items())
    buffers = dict(trained.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in engine.policy.named_buffers())
    assert not any(torch.equal(weight, new[name]) for name, weight in trained.named_parameters() if weight.any())
    with pytest.raises(ConfigurationError, match=r"lm_head.*no such weight|embed_tokens.*no such weight"):
        engine.update_weights([(n, w) for n, w in new.items() if "lm_head" not in n and "embed_tokens" not in n], 2)


def test_shared_weights_do_not_change_under_rollouts(policies: tuple[Any, Any], processor: Any) -> None:
    old, _ = policies
    assert not TransformersEngine(old, processor, own_weights=True, reproducible=True).live_updates
    engine = TransformersEngine(old, processor)

    async def go() -> None:
        async with engine.session(SessionKey(task_id="a", rollout=0)):
            engine.update_weights(old.named_parameters(), 1)

    with pytest.raises(ConfigurationError, match="own_weights"):
        asyncio.run(go())


@pytest.mark.parametrize(("bad", "named"), [({"on_update": "forget"}, "forget"), ({"evict_idle_s": -1.0}, "-1")])
def test_settings_that_cannot_work_are_refused(
    policies: tuple[Any, Any], processor: Any, bad: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        TransformersEngine(policies[0], processor, **bad)
