"""A Trainer and a module that only write down which batches they were given."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from opensearch_lightning.chat import SFTBatch
from opensearch_lightning.types import RolloutBatch


class Broken(Exception):
    """Raised in the middle of a step."""


def key(batch: Any) -> Any:
    """What a batch holds, to compare by."""
    if isinstance(batch, RolloutBatch):
        return tuple(task.id for task in batch.tasks)
    assert isinstance(batch, SFTBatch)
    return tuple(one.input_ids.numpy().tobytes() for one in batch.passes)


class Recorder(L.LightningModule):
    """Keeps the batches it was trained on, and after how many of them it was validated.

    Args:
        updates: optimizer updates of one step.
        break_at: number of the step that raises, counted in this process.
    """

    def __init__(self, *, updates: int = 1, break_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(1))
        self.updates, self.break_at = updates, break_at
        self.trained: list[Any] = []
        self.validated: list[tuple[int, str]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if len(self.trained) == self.break_at:
            raise Broken
        optimizer: Any = self.optimizers()
        for _ in range(self.updates):
            optimizer.step()
        self.trained.append(key(batch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((self.trainer.global_step, getattr(batch, "split", "")))


def checkpoints(folder: Path, **options: Any) -> ModelCheckpoint:
    """Every checkpoint, named by step."""
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, auto_insert_metric_name=False, **options)


def trainer(max_steps: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A silent Trainer that counts steps."""
    settings: dict[str, Any] = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None,
    }
    return L.Trainer(max_steps=max_steps, callbacks=list(callbacks), **{**settings, **options})
