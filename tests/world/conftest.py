"""A small world with pictures of every kind, shared by these tests."""

from __future__ import annotations

import pytest

from opensearch_lightning.world import World, build_world


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    pictures = {
        "emblem": 0.52,
        "labelled": 0.08,
        "sign": 0.08,
        "scene": 0.08,
        "blurred": 0.08,
        "small": 0.08,
        "skewed": 0.08,
    }
    splits = {"sft": 50, "rl": 20, "val": 10, "test": 20}
    return build_world(tmp_path_factory.mktemp("small") / "world", pages=40, seed=1, splits=splits, pictures=pictures)


@pytest.fixture(scope="session")
def all_tasks(world):
    return [task for split in world.splits for task in world.tasks(split)]
