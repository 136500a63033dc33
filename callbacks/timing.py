"""Logs how long a training step takes."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class StepTiming(L.Callback):
    """Logs ``time/step_s``: wall seconds from the end of one training step to the end of the next.

    Reading data, rollouts and validations in between are part of it; the first step counts from the start of training.
    """

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._last_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the seconds since the last step."""
        now_s = time.perf_counter()
        pl_module.log("time/step_s", now_s - self._last_s, on_step=True, on_epoch=False, batch_size=1)
        self._last_s = now_s
