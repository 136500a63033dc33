"""Ctrl-C that loses nothing: finish the step, write a checkpoint, stop."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from opensearch_lightning.errors import ConfigurationError


class TrainingInterrupted(Exception):
    """Raised out of ``Trainer.fit`` after a first Ctrl-C.

    Args:
        step: optimizer updates done.
        checkpoint: what was written and can be given as ``ckpt_path``; ``None`` before the first step.
    """

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        saved = f"saved {checkpoint}" if checkpoint is not None else "nothing to save yet"
        super().__init__(f"interrupted after {step} updates; {saved}")
        self.step = step
        self.checkpoint = checkpoint


class GracefulInterrupt(pl.Callback):
    """Turns the first Ctrl-C into a checkpoint and an orderly end, and the second into an immediate one.

    The step that runs is finished, its metrics are logged, and a validation that runs or is due is left out. On
    several ranks all stop at the same step. Other handlers of SIGINT are put back when fitting ends.

    Args:
        checkpoint: file (or, with a sharded strategy, folder) to write.

    Raises:
        TrainingInterrupted: from ``Trainer.fit``, once the checkpoint is written.
        KeyboardInterrupt: inside ``Trainer.fit`` at the second Ctrl-C; Lightning then exits.

    Example::

        trainer = Trainer(max_steps=200, callbacks=[GracefulInterrupt("runs/a/checkpoints/last.ckpt")])
    """

    def __init__(self, checkpoint: str | Path) -> None:
        if not str(checkpoint):
            raise ConfigurationError("GracefulInterrupt got an empty path; give it the file to write, say last.ckpt")
        self.checkpoint = Path(checkpoint)
        self.asked = False
        self._saved: Path | None = None
        self._stopping = False
        self._previous: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier fit and how it ended."""
        self.asked, self._saved, self._stopping = False, None, False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over SIGINT. Only the main thread may; elsewhere Ctrl-C stays what it was."""
        # Not earlier: Lightning notes all handlers after on_fit_start and puts those back at its end.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the checkpoint; the end comes at the next hook, when this step's metrics have been logged."""
        if self._agreed(trainer):
            self._save(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop before another step begins."""
        self._stop_if_saved(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop also when the interrupted step was the last one of an epoch."""
        self._stop_if_saved(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out a validation that is due at the interrupted step."""
        self._stop_if_saved(trainer)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Cut a running validation: the state of training is the same before and after it."""
        if self._agreed(trainer):
            if trainer.global_step:
                self._save(trainer)
            self._stopping = True
            self._stop_if_saved(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give SIGINT back."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give SIGINT back."""
        self._release()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nFinishing this step; Ctrl-C again stops at once.", file=sys.stderr, flush=True)

    def _agreed(self, trainer: pl.Trainer) -> bool:
        """Whether any rank was asked to stop: saving is collective, so all must do it at the same step."""
        return trainer.strategy.reduce_boolean_decision(self.asked, all=False)

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.checkpoint)
        self._saved = self.checkpoint
        self._stopping = True

    def _stop_if_saved(self, trainer: pl.Trainer) -> None:
        if self._stopping:
            raise TrainingInterrupted(trainer.global_step, self._saved)

    def _release(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
