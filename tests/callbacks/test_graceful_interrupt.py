"""Ctrl-C on a callback that outlives a fit; the rest of it is tested where runs are launched."""

from pathlib import Path

import lightning as L
import pytest

from opensearch_lightning.callbacks import GracefulInterrupt, TrainingInterrupted
from tests.toy_run import ToyData, ToyModule, ToyPolicy


def fit(callback: GracefulInterrupt, log: Path, interrupt: dict[str, int] | None = None) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=4,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ToyModule(ToyPolicy(), log=str(log), interrupt=interrupt), datamodule=ToyData())
    return trainer


def test_an_interrupted_callback_serves_another_fit(tmp_path: Path) -> None:
    callback = GracefulInterrupt(tmp_path / "last.ckpt")
    with pytest.raises(TrainingInterrupted, match="after 2 updates"):
        fit(callback, tmp_path / "log", {"train": 1})
    assert fit(callback, tmp_path / "log").global_step == 4
    with pytest.raises(TrainingInterrupted, match="after 3 updates"):
        fit(callback, tmp_path / "log", {"train": 2})
