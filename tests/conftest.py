"""A tiny world and a tiny model, built once a test session and shared by all tests that need a whole environment."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_world_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world of a few dozen pages with tasks of every split; read only."""
    from opensearch_lightning.world import build_world

    folder = tmp_path_factory.mktemp("tiny") / "world"
    # Clean emblems only: degraded pictures are calibrated by OCR, which takes seconds each.
    splits = {"sft": 12, "rl": 8, "val": 4, "test": 4}
    build_world(folder, pages=40, seed=0, splits=splits, pictures={"emblem": 1.0}, workers=1)
    return folder


@pytest.fixture(scope="session")
def tiny_world(tiny_world_dir: Path) -> Any:
    """The same, opened."""
    from opensearch_lightning.world import World

    return World.open(tiny_world_dir)


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_world: Any, tiny_world_dir: Path) -> Path:
    """A checkpoint of the real model class with random weights, whose tokenizer knows the world's texts."""
    from opensearch_lightning.models import build_tiny_checkpoint

    folder = tiny_world_dir.with_name("model")
    sizes = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
    return build_tiny_checkpoint(folder, tiny_world.corpus_texts(), vocab_size=768, **sizes)


@pytest.fixture(scope="session")
def tiny_sft_shards(tiny_world: Any, tiny_world_dir: Path) -> Path:
    """Trajectories of the scripted expert."""
    from opensearch_lightning.callbacks.rollout import DEFAULT_SYSTEM_PROMPT
    from opensearch_lightning.data import write_sft_shards
    from opensearch_lightning.rewards import ExactMatchJudge
    from opensearch_lightning.tools import ToolExecutor, offline_tools
    from opensearch_lightning.world.expert import ScriptedExpert

    async def collect() -> list[dict[str, Any]]:
        executor = ToolExecutor(offline_tools(tiny_world))
        expert = ScriptedExpert(executor, ExactMatchJudge(), system_prompt=DEFAULT_SYSTEM_PROMPT)
        rows, _ = await expert.collect(tiny_world.tasks("sft"))
        await executor.aclose()
        return rows

    folder = tiny_world_dir.with_name("sft")
    write_sft_shards(asyncio.run(collect()), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_rl_shards(tiny_world: Any, tiny_world_dir: Path) -> Path:
    """Tasks without trajectories."""
    from opensearch_lightning.data import write_rl_shards

    folder = tiny_world_dir.with_name("rl")
    write_rl_shards(tiny_world.tasks("rl"), folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_world_dir: Path, tiny_model_dir: Path, tiny_sft_shards: Path, tiny_rl_shards: Path) -> dict[str, Path]:
    """All folders of the tiny environment by name; ``root`` holds them."""
    return {
        "root": tiny_world_dir.parent,
        "world": tiny_world_dir,
        "model": tiny_model_dir,
        "sft": tiny_sft_shards,
        "rl": tiny_rl_shards,
    }
