"""The newest state of a run, always under one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from opensearch_lightning.errors import ConfigurationError


class LastCheckpoint(Checkpoint):
    """Writes one checkpoint over and over: after each validation, every n-th step, and at the end of training.

    Lightning's ``ModelCheckpoint(save_last=True)`` writes its last checkpoint only where the best one changed. List
    this callback behind the ``ModelCheckpoint`` that keeps the best one, so that it saves that one's new state.

    Args:
        path: file (or, with a sharded strategy, folder) to write.
        every_n_steps: also after every n-th training batch; ``None``: not between validations.

    Raises:
        ConfigurationError: ``every_n_steps`` below 1.
    """

    def __init__(self, path: str | Path, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}; set 1 or more, or null for none")
        self.path = Path(path)
        self.every_n_steps = every_n_steps
        self._saved_step = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every n-th step."""
        if self.every_n_steps is not None and (batch_idx + 1) % self.every_n_steps == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save with the new best score."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what was trained since the last time."""
        if trainer.global_step != self._saved_step:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step
