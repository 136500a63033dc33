"""One line of progress with the figures of tool use that matter."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from opensearch_lightning.errors import ConfigurationError

SHOWN = {
    "train/loss": "loss",
    "train/token_accuracy": "token accuracy",
    "train/reward": "reward",
    "train/accuracy": "accuracy",
    "train/turns": "turns",
    "val/loss": "held-out loss",
    "val_greedy/accuracy": "greedy",
    "val_sampled/accuracy": "sampled",
}
"""Metrics shown and their names on the line, in order; those that a run does not log are left out."""


class RolloutProgressBar(ProgressBar):
    """A bar over optimizer updates; where the output is no terminal, one plain line every so often.

    Args:
        shown: metric name to label, in the order of display.
        every_s: seconds between two lines where the output is no terminal.
    """

    def __init__(self, shown: Mapping[str, str] | None = None, *, every_s: float = 15.0) -> None:
        super().__init__()
        if every_s < 0:
            raise ConfigurationError(f"every_s is {every_s}; set the seconds between two lines of progress, 0 or more")
        self.shown = dict(SHOWN if shown is None else shown)
        self.every_s = every_s
        self._enabled = True
        self._bar: tqdm | None = None
        self._last_line = ""
        self._last_line_s = float("-inf")

    def disable(self) -> None:
        """Show nothing (Lightning calls this on every rank but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar at the update that a resumed run stands at."""
        if self._enabled and sys.stderr.isatty():
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._bar = tqdm(total=total, initial=trainer.global_step, desc="training", unit="step", dynamic_ncols=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance to the updates done; one batch can make several."""
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)
        self._show(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what the wait is for."""
        if self._bar is not None:
            self._bar.set_description("validation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go back to training, with the new figures."""
        if self._bar is not None:
            self._bar.set_description("training")
        if not trainer.sanity_checking:
            self._show(trainer, now=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the last state of the line on the screen."""
        self._show(trainer, now=True)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the line, so that the message that follows stands on its own."""
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._bar is not None:
            self._bar.write(" ".join(map(str, args)))
        else:
            print(*args, **kwargs)

    def figures(self, metrics: Mapping[str, Any]) -> str:
        """The metrics that are shown, as text: ``"loss 0.412, reward 0.70"``."""
        found = [(label, float(metrics[name])) for name, label in self.shown.items() if name in metrics]
        return ", ".join(f"{label} {value:.3g}" for label, value in found)

    def _show(self, trainer: pl.Trainer, *, now: bool = False) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self.figures(trainer.callback_metrics))
            return
        clock_s = time.monotonic()
        if self._enabled and (now or clock_s - self._last_line_s >= self.every_s):
            self._last_line_s = clock_s
            total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            line = f"step {trainer.global_step}{total}: {self.figures(trainer.callback_metrics)}"
            if line != self._last_line:
                print(line, file=sys.stderr, flush=True)
            self._last_line = line

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
