"""The line of progress: what it shows, and that it stays quiet where nobody looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensearch_lightning.callbacks.progress import RolloutProgressBar
from opensearch_lightning.errors import ConfigurationError


def trainer(step: int, **metrics: float) -> Any:
    values = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
    return SimpleNamespace(global_step=step, max_steps=40, callback_metrics=values, sanity_checking=False)


def test_figures_in_order_with_their_names() -> None:
    metrics = {
        "train/turns": 2.25,
        "train/grad_norm": 9.0,
        "val_sampled/accuracy": torch.tensor(0.5),
        "train/loss": 1e-3,
    }
    assert RolloutProgressBar().figures(metrics) == "loss 0.001, turns 2.25, sampled 0.5"


def test_lines_without_a_terminal_come_at_intervals_and_after_validation(capsys: pytest.CaptureFixture[str]) -> None:
    bar = RolloutProgressBar(every_s=1000)
    bar.on_train_start(trainer(0), None)
    for step in (1, 2, 3):
        bar.on_train_batch_end(trainer(step, train__reward=0.5), None, None, None, step)
    bar.on_validation_end(trainer(3, train__reward=0.5, val_greedy__accuracy=0.25), None)
    assert capsys.readouterr().err.splitlines() == [
        "step 1/40: reward 0.5",
        "step 3/40: reward 0.5, greedy 0.25",
    ]


def test_bar_on_a_terminal_follows_updates_not_batches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = RolloutProgressBar()
    bar.on_train_start(trainer(4), None)
    bar.on_train_batch_end(trainer(8, train__accuracy=0.75), None, None, None, 1)
    bar.on_train_end(trainer(8, train__accuracy=0.75), None)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "8/40" in last
    assert "accuracy 0.75" in last


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = RolloutProgressBar()
    bar.disable()
    bar.on_train_start(trainer(0), None)
    bar.on_train_batch_end(trainer(1, train__reward=0.5), None, None, None, 0)
    bar.on_train_end(trainer(1), None)
    assert capsys.readouterr().err == ""


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_s is -1"):
        RolloutProgressBar(every_s=-1)
