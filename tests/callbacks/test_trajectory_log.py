"""TrajectoryLog: whole groups on disk, few enough, and the same after kills and resumes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from opensearch_lightning.callbacks.trajectory_log import TrajectoryLog, kept_steps
from opensearch_lightning.dashboards.records import image_file_name
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.modules.grpo import AdvantageRecord
from opensearch_lightning.types import RolloutBatch, Task, TrajectoryGroup
from tests.dashboards.sample_runs import Words, group, right_run, task, wrong_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WORDS = Words()


class Rollouts(pl.Callback):
    """Stands for the callbacks that fill and mask a batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch.groups[:] = [alike(batch.tasks[0]), group(pl_module.step, WORDS, size=4)]

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        batch.groups[:] = [
            TrajectoryGroup(task=item, trajectories=(right_run(item, 0, WORDS),)) for item in batch.tasks
        ]


def alike(item: Task) -> TrajectoryGroup:
    return TrajectoryGroup(
        task=item, trajectories=tuple(wrong_run(item, rollout, WORDS) for rollout in range(4)), kept_steps=(0, 1, 2, 3)
    )


class Module(pl.LightningModule):
    """Two updates a batch, and advantages as the GRPO module tells them."""

    def __init__(self, stop: Callable[[str, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.stop = stop
        self.last_advantages: AdvantageRecord | None = None

    @property
    def step(self) -> int:
        return self.global_step // 2

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self.stop("train", self.step)
        trajectories = tuple(item for one in batch.groups for item in one.trajectories)
        raw = torch.linspace(-1, 1, len(trajectories))
        self.last_advantages = AdvantageRecord(
            trajectories=trajectories,
            group_ids=torch.arange(len(raw)) // 4,
            valid=torch.arange(len(raw)) != 4,
            is_fatal=torch.tensor([item.is_fatal for item in trajectories]),
            kept_steps=torch.zeros(len(raw)),
            raw=raw,
            advantages=raw.clamp(min=0),
        )
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.stop("val", self.step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def batches(split: str, count: int) -> DataLoader:
    made = [RolloutBatch(tasks=[task(100 + i), task(200 + i)], split=split) for i in range(count)]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def fit(
    directory: Path,
    log: TrajectoryLog | None = None,
    stop: Callable[[str, int], None] = lambda where, step: None,
    steps: int = 12,
) -> TrajectoryLog:
    checkpoint = ModelCheckpoint(
        directory / "checkpoints", save_last=True, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False
    )
    log = log or TrajectoryLog(WORDS.decode, every_n_steps=2, groups=1, val_groups=3, keep=3)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2 * steps,
        val_check_interval=2,
        default_root_dir=directory,
        logger=False,
        callbacks=[Rollouts(), log, checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = directory / "checkpoints" / "last.ckpt"
    held_out = [batches("val_greedy", 2), batches("val_sampled", 1)]
    trainer.fit(Module(stop), batches("train", 12), held_out, ckpt_path=last if last.exists() else None)
    return log


def files(directory: Path) -> dict[str, bytes]:
    """Every file of a log with its content."""
    found = [path for path in (directory / "trajectories").rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(found)}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    fit(directory)
    return directory


def test_the_most_telling_group_is_written_with_its_mask_and_advantages(tmp_path: Path) -> None:
    fit(tmp_path, TrajectoryLog(WORDS.decode, every_n_steps=1, groups=1, val_groups=0), steps=1)
    made = lines(tmp_path / "trajectories" / "train-00000000.jsonl")
    assert [item["task_id"] for item in made] == ["task-0000"] * 4, "all of one task, not the group of equal outcomes"
    assert (made[0]["step"], made[0]["global_step"], made[0]["split"]) == (0, 2, "train")
    assert made[2]["kept_before"] == made[2]["fatal_step"] == 1
    assert made[0]["raw_advantage"] is None, "a row without a vote has no advantage"
    assert [item["raw_advantage"] for item in made[1:]] == pytest.approx([3 / 7, 5 / 7, 1.0])
    for item in made:
        for image in item["images"]:
            encoded = (tmp_path / "trajectories" / "images" / image["file"]).read_bytes()
            assert image_file_name(encoded) == image["file"]


def test_a_clamped_advantage_stands_beside_the_raw_one(tmp_path: Path) -> None:
    fit(tmp_path, TrajectoryLog(WORDS.decode, every_n_steps=1, groups=2, val_groups=0), steps=1)
    made = lines(tmp_path / "trajectories" / "train-00000000.jsonl")
    assert (made[4]["raw_advantage"], made[4]["advantage"]) == (-1.0, 0.0)
    assert [item["kept_before"] for item in made[4:]] == [0, 1, 2, 3]


def test_validation_writes_the_first_groups_of_each_split_and_the_sanity_check_none(whole: Path) -> None:
    made = lines(whole / "trajectories" / "val_greedy-00000001.jsonl")
    assert [item["task_id"] for item in made] == ["task-0100", "task-0200", "task-0101"]
    assert {item["advantage"] for item in made} == {None}
    sampled = lines(whole / "trajectories" / "val_sampled-00000001.jsonl")
    assert [item["task_id"] for item in sampled] == ["task-0100", "task-0200"]
    assert not list((whole / "trajectories").glob("val_*-00000000.jsonl"))


def test_few_files_stay_spread_over_the_run_and_no_picture_without_one(whole: Path) -> None:
    folder = whole / "trajectories"
    names = sorted(path.name for path in folder.glob("*.jsonl"))
    assert names == [
        *(f"train-{step:08d}.jsonl" for step in (0, 4, 8, 10)),
        *(f"val_greedy-{step:08d}.jsonl" for step in (1, 5, 9, 11)),
        *(f"val_sampled-{step:08d}.jsonl" for step in (1, 5, 9, 11)),
    ]
    used = {image["file"] for path in folder.glob("*.jsonl") for item in lines(path) for image in item["images"]}
    assert {path.name for path in (folder / "images").iterdir()} == used


def killed_fit(directory: Path, where: str, step: int) -> None:
    def stop(here: str, at: int) -> None:
        if (here, at) == (where, step):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=fit, args=(directory, None, stop))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("where", "step"), [("train", 3), ("train", 9), ("val", 8)])
def test_a_killed_and_resumed_run_leaves_the_same_files(tmp_path: Path, whole: Path, where: str, step: int) -> None:
    killed_fit(tmp_path, where, step)
    assert files(tmp_path)
    fit(tmp_path)
    assert files(tmp_path) == files(whole)


def test_a_run_from_nothing_clears_the_files_of_an_older_one(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "trajectories"
    (folder / "images").mkdir(parents=True)
    (folder / "train-00000050.jsonl").write_text('{"images": []}\n')
    (folder / "images" / "old.png").write_bytes(b"x")
    fit(tmp_path)
    assert files(tmp_path) == files(whole)


@pytest.mark.parametrize("keep", [2, 3, 7])
def test_what_is_kept_depends_on_the_steps_alone(keep: int) -> None:
    """Dropping on the way, in any pattern, and dropping once at the end leave the same steps."""
    steps = [1, 4, 5, 9, 16, 17, 30, 33, 64, 65, 70, 99, 100]
    alive: list[int] = []
    for step in steps:
        alive = sorted(kept_steps([*alive, step], keep))
        assert len(alive) <= keep + 1
        assert alive[0] == steps[0] and alive[-1] == step
    assert alive == sorted(kept_steps(steps, keep))


def test_a_batch_without_masks_keeps_every_sampled_token(tmp_path: Path) -> None:
    class Unmasked(Rollouts):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch.groups[:] = [replace(group(2, WORDS, size=4), kept_steps=None)]

    log = TrajectoryLog(WORDS.decode, directory=tmp_path / "own", every_n_steps=1)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, callbacks=[Unmasked(), log], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(lambda where, step: None), batches("train", 1))
    made = lines(tmp_path / "own" / "train-00000000.jsonl")
    assert len(made) == 4
    assert all(item["token_counts"]["masked"] == 0 for item in made)


@pytest.mark.parametrize(("setting", "value"), [("every_n_steps", -1), ("groups", -2), ("keep", 1)])
def test_a_setting_that_cannot_work_is_refused(setting: str, value: int) -> None:
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(ConfigurationError, match=f"{setting} is {value}"):
        TrajectoryLog(WORDS.decode, **settings)
