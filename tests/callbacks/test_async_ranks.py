"""Rollouts that run ahead in two processes that train together: two forks do the work, the tests look at it."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from opensearch_lightning.data import SearchVLRLDataModule
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rollout import SessionKey
from opensearch_lightning.types import RolloutBatch
from tests.callbacks.test_async_rollouts import LiveEngine, Wait, generation
from tests.data.rows import rl_shards
from tests.data.trainers import checkpoints
from tests.strategies.cpu_ranks import on_ranks, trainer

STEPS, PROMPTS = 3, 4


class KeepingEngine(LiveEngine):
    """Keeps a number out of the weights of each version."""

    def __init__(self, wait: Wait) -> None:
        super().__init__(wait)
        self.weights: dict[int, list[float]] = {}

    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().update_weights([], version)
        self.weights[version] = [float(weight.double().sum()) for _, weight in named_weights]


class Module(L.LightningModule):
    """Trains a line on as many ones as it has groups, and keeps which they were."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.policy = nn.Linear(2, 2)
        self.trained: list[list[str]] = []
        self.ages: list[int] = []
        self.has_trained = threading.Event()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.policy(torch.ones(len(batch.groups), 2)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        self.has_trained.set()
        self.trained.append([group.task.id for group in batch.groups])
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        assert batch.number is not None
        self.ages += [batch.number - row.weight_version for row in rows]


def fit(name: str, shards: Path, *callbacks: Any, ckpt: Path | None = None) -> dict[str, Any]:
    data = SearchVLRLDataModule(shards, prompts_per_step=PROMPTS)
    slow, module = in_order(shards)[0][1], Module()

    async def wait(key: SessionKey) -> None:
        # a task of the second rank's first share comes late, so that this rank alone trains out of order
        while key.task_id == slow and not module.has_trained.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0.002)

    engine = KeepingEngine(wait)
    run = trainer(name, STEPS, generation(engine), *callbacks, enable_checkpointing=bool(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=False)
    return {"trained": module.trained, "ages": module.ages, "weights": engine.weights, "open": engine.n_open}


def in_order(shards: Path) -> list[list[str]]:
    """The tasks of the first steps of all ranks, in the order of the data."""
    data = SearchVLRLDataModule(shards, prompts_per_step=PROMPTS)
    return [[task.id for task in data.train_batch(number).tasks] for number in range(STEPS)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl_shards(tmp_path_factory.mktemp("rl") / "s", 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(shards: Path, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each rank: a run, and one that goes on from its first checkpoint."""

    def work() -> tuple[dict[str, Any], dict[str, Any]]:
        whole = fit("ddp", shards, checkpoints(folder / "saved", every_n_train_steps=1))
        return whole, fit("ddp", shards, ckpt=folder / "saved" / "1.ckpt")

    return on_ranks(work, folder / "work")


def tasks_of(runs: Iterable[list[list[str]]]) -> list[str]:
    return sorted(task_id for trained in runs for batch in trained for task_id in batch)


def test_two_ranks_train_every_task_once(shards: Path, ranks: Any) -> None:
    first, second = (whole for whole, _ in ranks)
    assert tasks_of([first["trained"], second["trained"]]) == tasks_of([in_order(shards)])
    assert [len(batch) for batch in first["trained"] + second["trained"]] == [PROMPTS // 2] * (2 * STEPS)
    # each its own share, whose late task the second rank trained in a later step
    assert tasks_of([first["trained"]]) == tasks_of([[batch[0::2] for batch in in_order(shards)]])
    assert in_order(shards)[0][1] in second["trained"][1]
    assert max(first["ages"] + second["ages"]) == 1
    assert first["open"] == second["open"] == 0


def test_all_ranks_sample_from_the_weights_that_they_train_together(ranks: Any) -> None:
    first, second = (whole["weights"] for whole, _ in ranks)
    assert list(first) == [0, 1, 2]
    assert first == second
    assert len({tuple(weights) for weights in first.values()}) == STEPS


def test_parts_of_the_weights_are_put_together_on_all_ranks(shards: Path, folder: Path, ranks: Any) -> None:
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")
    first, second = on_ranks(lambda: fit("zero3", shards), folder / "zero3")
    assert tasks_of([first["trained"], second["trained"]]) == tasks_of([in_order(shards)])
    # the same as without parts
    for run in (first, second):
        assert list(run["weights"]) == [0, 1, 2]
        for version, weights in ranks[0][0]["weights"].items():
            assert run["weights"][version] == pytest.approx(weights, rel=1e-5)


def test_two_resumed_ranks_train_the_rest_once(shards: Path, folder: Path, ranks: Any) -> None:
    saved = torch.load(folder / "saved" / "1.ckpt", weights_only=False)["callbacks"]
    (ledgers,) = (state["run_ahead"] for state in saved.values() if "run_ahead" in state)
    before = [whole["trained"][:1] for whole, _ in ranks]
    # both handed out two steps' tasks and trained one step's, in whatever order these were done
    for rank, (ledger, (trained,)) in enumerate(zip(ledgers, before, strict=True)):
        handed_out = [
            (task, [step, index])
            for step, tasks in enumerate(in_order(shards)[:2])
            for index, task in enumerate(tasks[rank::2])
        ]
        assert ledger["open"] == [place for task, place in handed_out if task not in trained]
    assert ledgers[1]["open"][0] == [0, 0]  # the late task
    after = [resumed["trained"] for _, resumed in ranks]
    assert [len(trained) for trained in after] == [STEPS - 1] * 2
    assert tasks_of(before + after) == tasks_of([in_order(shards)])


def test_another_number_of_ranks_is_refused(shards: Path, folder: Path, ranks: Any) -> None:
    with pytest.raises(ConfigurationError, match="2 ranks had handed out .* this run has 1"):
        fit("one", shards, ckpt=folder / "saved" / "1.ckpt")
