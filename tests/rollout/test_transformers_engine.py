import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import TokenizedSample, collate
from opensearch_lightning.errors import ConfigurationError, RolloutLost
from opensearch_lightning.models import load_policy, load_processor, policy_logprobs
from opensearch_lightning.rollout import FinishReason, SamplingParams, SessionKey, TransformersEngine

Played = dict[SessionKey, tuple[TokenizedSample, torch.Tensor]]


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Any:
    model = load_policy(tiny_model_dir)
    with torch.no_grad():
        # random weights are nearly uniform; sharper ones make the comparison mean something
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Any:
    return load_processor(tiny_model_dir)


def picture(seed: int, width: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, width, 3), dtype=np.uint8))


async def play(
    engine: TransformersEngine, *, tasks: int = 3, group: int = 4, temperature: float = 0.7, slow: bool = False
) -> Played:
    """Three turns of every rollout, prompts of different length, observations with and without pictures."""
    played: Played = {}

    async def one(task: int, rollout: int) -> None:
        key = SessionKey(task_id=str(task), rollout=rollout)
        rng = random.Random(f"{task}.{rollout}")
        ids: list[int] = []
        steps: list[int] = []
        logprobs: list[float] = []
        images: list[Any] = []
        async with engine.session(key) as session:
            given = engine.renderer.prompt("Search.", [picture(task, 64 + 32 * task), "What is it? " * (task + 1)])
            for step in range(3):
                sampling = SamplingParams(temperature=temperature, max_turn_tokens=rng.randint(3, 12), seed=5)
                turn = await session.generate(given.token_ids, given.images, sampling, step)
                ids += [*given.token_ids, *turn.token_ids]
                steps += [-1] * len(given.token_ids) + [step] * len(turn.token_ids)
                logprobs += [0.0] * len(given.token_ids) + turn.logprobs
                images += given.images
                if slow:
                    await asyncio.sleep(random.random() * 0.01)
                shown = [picture(9)] if rng.random() < 0.5 else []
                given = engine.renderer.observation("found " * rng.randint(1, 9), shown, first_image=len(images) + 1)
        sample = TokenizedSample(token_ids=torch.tensor(ids), step_ids=torch.tensor(steps), images=tuple(images))
        played[key] = (sample, torch.tensor(logprobs))

    await asyncio.gather(*(one(task, rollout) for task in range(tasks) for rollout in range(group)))
    return played


@pytest.mark.parametrize("slots", [32, 3], ids=["a place for all", "fewer places than rollouts"])
@pytest.mark.parametrize(("temperature", "head_dtype"), [(1.0, None), (0.7, None), (0.7, "float64")])
def test_sampled_logprobs_are_those_of_the_trainer(
    policy: Any, processor: Any, tiny_model_dir: Path, slots: int, temperature: float, head_dtype: str | None
) -> None:
    weights = policy.state_dict()
    policy = load_policy(tiny_model_dir, head_dtype=head_dtype)
    policy.load_state_dict(weights)
    engine = TransformersEngine(policy, processor, max_sequences=slots, max_prefill_tokens=256)
    played = asyncio.run(play(engine, temperature=temperature, slow=True))
    assert len(played) == 12
    for sample, sampling_logprobs in played.values():
        batch = collate(
            [sample],
            pad_id=engine.renderer.pad_id,
            image_token_id=engine.renderer.image_token_id,
            merge_size=engine.renderer.merge_size,
        )
        with torch.no_grad():
            logprobs, _ = policy_logprobs(policy, batch, batch.step_ids >= 0, temperature=temperature)
        ratio = (logprobs[0] - sampling_logprobs).exp()
        assert (ratio - 1).abs().max() < 1e-5
        assert any(len(sample.images) > 1 for sample, _ in played.values())


def test_rollouts_of_a_group_differ_and_come_again(policy: Any, processor: Any) -> None:
    engine = TransformersEngine(policy, processor, max_sequences=32)
    first = asyncio.run(play(engine, tasks=1, group=8, temperature=1.0, slow=True))
    again = asyncio.run(play(engine, tasks=1, group=8, temperature=1.0))
    texts = {key: tuple(sample.token_ids.tolist()) for key, (sample, _) in first.items()}
    assert len(set(texts.values())) == 8
    assert texts == {key: tuple(sample.token_ids.tolist()) for key, (sample, _) in again.items()}


@pytest.mark.parametrize("slots", [32, 5])
def test_lockstep_gives_the_same_bits_whatever_the_timing(policy: Any, processor: Any, slots: int) -> None:
    engine = TransformersEngine(policy, processor, max_sequences=slots, reproducible=True)
    first = asyncio.run(play(engine, slow=True))
    again = asyncio.run(play(engine, slow=True))
    assert all(torch.equal(first[key][1], again[key][1]) for key in first)


def test_a_sequence_past_the_model_length_ends_alone(policy: Any, processor: Any) -> None:
    engine = TransformersEngine(policy, processor, max_sequences=4, max_length=120)

    async def two() -> list[FinishReason]:
        async def ask(question: str) -> FinishReason:
            async with engine.session(SessionKey(task_id=question, rollout=0)) as session:
                given = engine.renderer.prompt(None, [question])
                sampling = SamplingParams(max_turn_tokens=4)
                return (await session.generate(given.token_ids, given.images, sampling, 0)).finish

        return list(await asyncio.gather(ask("what " * 500), ask("what")))

    long, short = asyncio.run(two())
    assert long is FinishReason.CONTEXT
    assert short in (FinishReason.LENGTH, FinishReason.STOP)


def test_generation_stops_at_the_model_length(policy: Any, processor: Any) -> None:
    engine = TransformersEngine(policy, processor, max_sequences=4, max_length=40)

    async def ask() -> tuple[int, Any]:
        async with engine.session(SessionKey(task_id="a", rollout=0)) as session:
            given = engine.renderer.prompt(None, ["what"])
            turn = await session.generate(given.token_ids, (), SamplingParams(max_turn_tokens=100, temperature=2.0), 0)
            return len(given.token_ids) + len(turn.token_ids), turn.finish

    total, finish = asyncio.run(ask())
    assert (total, finish) == (40, FinishReason.CONTEXT) or finish is FinishReason.STOP


def test_an_engine_that_fails_loses_its_rollouts_and_goes_on(
    policy: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(policy, processor, max_sequences=8)

    async def ask(task: str) -> int:
        async with engine.session(SessionKey(task_id=task, rollout=0)) as session:
            given = engine.renderer.prompt(None, ["what"])
            return len((await session.generate(given.token_ids, (), SamplingParams(max_turn_tokens=3), 0)).token_ids)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(policy.model, "forward", broken)

        async def all_fail() -> list[Any]:
            return await asyncio.gather(ask("a"), ask("b"), return_exceptions=True)

        outcomes = asyncio.run(asyncio.wait_for(all_fail(), 20))
    assert all(isinstance(outcome, RolloutLost) and "out of memory" in str(outcome) for outcome in outcomes)
    assert asyncio.run(asyncio.wait_for(ask("a"), 20)) > 0


def test_new_weights_are_used_and_unknown_ones_refused(tiny_model_dir: Path, processor: Any) -> None:
    served, trained = load_policy(tiny_model_dir), load_policy(tiny_model_dir)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(2)
    engine = TransformersEngine(served, processor)
    engine.update_weights(trained.named_parameters(), version=3)
    assert engine.weight_version == 3
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), trained.parameters(), strict=True))
    assert served.lm_head.weight.data_ptr() == served.model.language_model.embed_tokens.weight.data_ptr()
    weights = dict(trained.named_parameters())
    with pytest.raises(ConfigurationError, match=r"model\.wrong"):
        engine.update_weights({**weights, "model.wrong": torch.zeros(1)}.items(), version=4)
    missing = weights.pop("model.language_model.norm.weight")
    with pytest.raises(ConfigurationError, match=r"norm\.weight"):
        engine.update_weights(weights.items(), version=4)
    with pytest.raises(ConfigurationError, match=r"norm\.weight.*\(1,\)"):
        engine.update_weights({**weights, "model.language_model.norm.weight": missing[:1]}.items(), version=4)


def test_the_policy_goes_back_to_training_mode(policy: Any, processor: Any) -> None:
    engine = TransformersEngine(policy, processor)
    policy.train()
    asyncio.run(play(engine, tasks=1, group=1))
    assert policy.training
    policy.eval()
