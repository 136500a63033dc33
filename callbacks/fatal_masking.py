"""Chooses which steps of each trajectory carry gradient."""

from dataclasses import replace
from typing import Any, Literal

import lightning as L

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import NON_FATAL, RolloutBatch, Trajectory


class FatalStepMasking(L.Callback):
    """Sets ``kept_steps`` of every group: steps below that index are trained (Eq. 10).

    Args:
        mode: ``"none"`` keeps every sampled token; ``"hard"`` drops fatal trajectories whole, which keep their vote
            in the group statistics; ``"fatal"`` drops what was sampled from the fatal step on.

    Raises:
        ConfigurationError: another mode; or a batch without trajectories.

    Example::

        >>> from opensearch_lightning.callbacks import FatalStepMasking
        >>> FatalStepMasking(mode="fatal").mode
        'fatal'
    """

    def __init__(self, mode: Literal["none", "hard", "fatal"] = "fatal") -> None:
        if mode not in ("none", "hard", "fatal"):
            raise ConfigurationError(f'FatalStepMasking mode is {mode!r}; set "none", "hard" or "fatal"')
        self.mode = mode

    def kept_steps(self, trajectory: Trajectory) -> int:
        """First step of ``trajectory`` that is not trained."""
        if self.mode == "none":
            return NON_FATAL
        if self.mode == "hard":
            return 0 if trajectory.is_fatal else NON_FATAL
        return trajectory.fatal_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mask the batch that the rollouts filled."""
        if not isinstance(batch, RolloutBatch) or not batch.groups:
            raise ConfigurationError(
                "FatalStepMasking found no trajectories in the batch; list RolloutGeneration before it in callbacks"
            )
        batch.groups[:] = [
            replace(group, kept_steps=tuple(self.kept_steps(t) for t in group.trajectories)) for group in batch.groups
        ]
