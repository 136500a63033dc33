"""The CSV logger: one row a step, the same file after kills and resumes as without them."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from opensearch_lightning.dashboards.metrics_csv import MetricsCSV
from opensearch_lightning.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_what_is_logged_at_one_step_is_one_row_and_columns_may_come_later(tmp_path: Path) -> None:
    logger = MetricsCSV(tmp_path / "run")
    logger.log_metrics({"train/loss": 0.5, "epoch": 0}, step=0)
    logger.log_metrics({"train/loss": torch.tensor(0.25), "epoch": 0}, step=1)
    logger.log_metrics({"a/late": 3, "epoch": 0}, step=1)
    assert logger.path.read_text() == "step,epoch,a/late,train/loss\n0,0,,0.5\n1,0,3,0.25\n"


def test_values_read_back_exactly_and_odd_ones_are_kept(tmp_path: Path) -> None:
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"x": 0.1 + 0.2, "nan": float("nan"), "yes": True, 'a "name", odd': 1.0}, step=7)
    (row,) = rows(logger.path)
    assert float(row["x"]) == 0.1 + 0.2
    assert row["nan"] == "nan" and row["yes"] == "1" and row['a "name", odd'] == "1.0"


def test_a_later_logger_replaces_the_rows_from_its_first_step_on(tmp_path: Path) -> None:
    first = MetricsCSV(tmp_path)
    for step in range(5):
        first.log_metrics({"a": step, "only_first": 1} if step == 4 else {"a": step}, step=step)
    second = MetricsCSV(tmp_path)
    second.log_metrics({"a": 30}, step=3)
    assert second.path.read_text() == "step,a\n0,0\n1,1\n2,2\n3,30\n"


def test_a_row_keeps_its_training_half_when_a_run_resumes_inside_its_validation(tmp_path: Path) -> None:
    MetricsCSV(tmp_path).log_metrics({"train/loss": 1.0}, step=3)
    again = MetricsCSV(tmp_path)
    again.log_metrics({"val/accuracy": 0.5}, step=3)
    assert rows(again.path) == [{"step": "3", "train/loss": "1.0", "val/accuracy": "0.5"}]


def test_a_foreign_file_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("time,value\n1,2\n")
    with pytest.raises(DataError, match=r"metrics\.csv is not a metrics file"):
        MetricsCSV(tmp_path).log_metrics({"a": 1}, step=0)
    assert path.read_text() == "time,value\n1,2\n"


class Manual(pl.LightningModule):
    """Two optimizer updates a batch, a metric of every batch, one that comes late, a validation every second batch.

    ``stop`` is called with a place in the run and may kill it.
    """

    def __init__(self, stop: Callable[[str, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(2, 1)
        self.stop = stop

    def training_step(self, batch: Any, batch_idx: int) -> None:
        step = self.global_step // 2
        self.stop("train", step)
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.layer(torch.full((1, 2), 0.1 * step)).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train/loss", loss)
        self.log("time/step_s", float(os.getpid()))
        if step >= 5:
            self.log("train/late", float(step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.stop("val", self.global_step // 2 - 1)
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(directory: Path, stop: Callable[[str, int], None] = lambda where, step: None) -> None:
    """A run of 9 batches that saves after each validation and goes on from the last checkpoint, if there is one."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.ones(9, 2)))
    checkpoint = ModelCheckpoint(
        directory / "checkpoints", monitor="val/loss", save_last=True, every_n_epochs=1, save_on_train_epoch_end=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=18,
        val_check_interval=2,
        log_every_n_steps=1,
        logger=MetricsCSV(directory),
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    last = directory / "checkpoints" / "last.ckpt"
    trainer.fit(Manual(stop), data, data, ckpt_path=last if last.exists() else None)


def killed_fit(directory: Path, where: str, step: int) -> None:
    """The same in a process that SIGKILL ends at a place of the run."""

    def stop(here: str, at: int) -> None:
        if (here, at) == (where, step):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=fit, args=(directory, stop))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def without_times(path: Path) -> list[dict[str, str]]:
    return [{key: cell for key, cell in row.items() if not key.startswith("time/")} for row in rows(path)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("whole")
    fit(directory)
    return without_times(directory / "metrics.csv")


def test_a_row_is_a_training_batch_and_holds_its_validation(uninterrupted: list[dict[str, str]]) -> None:
    assert [row["step"] for row in uninterrupted] == [str(step) for step in range(9)]
    assert [bool(row["val/loss"]) for row in uninterrupted] == [False, True] * 4 + [False]
    assert all(row["train/loss"] for row in uninterrupted)


@pytest.mark.parametrize(("where", "step"), [("train", 2), ("val", 5), ("train", 8)])
def test_a_killed_and_resumed_run_ends_with_the_same_file(
    tmp_path: Path, uninterrupted: list[dict[str, str]], where: str, step: int
) -> None:
    killed_fit(tmp_path, where, step)
    assert rows(tmp_path / "metrics.csv")
    fit(tmp_path)
    assert without_times(tmp_path / "metrics.csv") == uninterrupted


def test_a_run_killed_twice_ends_with_the_same_file(tmp_path: Path, uninterrupted: list[dict[str, str]]) -> None:
    killed_fit(tmp_path, "train", 7)
    killed_fit(tmp_path, "val", 7)
    fit(tmp_path)
    assert without_times(tmp_path / "metrics.csv") == uninterrupted


def test_a_run_from_nothing_starts_a_new_file(tmp_path: Path, uninterrupted: list[dict[str, str]]) -> None:
    MetricsCSV(tmp_path).log_metrics({"old": 1}, step=0)
    fit(tmp_path)
    assert without_times(tmp_path / "metrics.csv") == uninterrupted


def test_validation_outside_fit_leaves_the_file_alone(tmp_path: Path) -> None:
    fit(tmp_path)
    before = (tmp_path / "metrics.csv").read_text()
    data = DataLoader(TensorDataset(torch.ones(3, 2)))
    trainer = pl.Trainer(
        accelerator="cpu", logger=MetricsCSV(tmp_path), enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.validate(Manual(lambda where, step: None), data, verbose=False)
    assert (tmp_path / "metrics.csv").read_text() == before
