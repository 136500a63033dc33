"""The file of scores before and after the clamp."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest

from opensearch_lightning.callbacks import ClampedAdvantageLogging
from opensearch_lightning.errors import ConfigurationError
from tests.callbacks.test_rollout_callbacks import noted_clamp


def write_step(path: Path, step: int, *, first_rank: bool = True) -> None:
    trainer = SimpleNamespace(
        strategy=L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).strategy,
        is_global_zero=first_rank,
    )
    ClampedAdvantageLogging(path).on_train_batch_end(trainer, noted_clamp(clamp_fatal=True), None, None, step)  # type: ignore[arg-type]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_scores_of_a_step_are_those_worked_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run" / "advantages.csv"
    write_step(path, 0)
    # rewards 1, 0, 0 against the mean of the others: 1, -1/2, -1/2; the last is fatal; the fourth has no reward
    assert [tuple(row.values()) for row in read(path)] == [
        ("0", "a", "0", "0", "1.0", "1", "1"),
        ("0", "a", "1", "0", "0.0", "-0.5", "-0.5"),
        ("0", "a", "2", "1", "0.0", "-0.5", "0"),
    ]


def test_steps_follow_each_other_and_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "advantages.csv"
    for step in (0, 1, 2):
        write_step(path, step)
    assert [row["step"] for row in read(path)] == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    write_step(path, 1)
    assert [row["step"] for row in read(path)] == ["0"] * 3 + ["1"] * 3
    write_step(path, 0)
    assert [row["step"] for row in read(path)] == ["0"] * 3


def test_the_first_rank_writes(tmp_path: Path) -> None:
    write_step(tmp_path / "advantages.csv", 0, first_rank=False)
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"path=.* is a folder; give the name of a file"):
        ClampedAdvantageLogging(tmp_path)
