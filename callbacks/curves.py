"""Logs what the rollouts of each batch show: reward, accuracy, turns, tool use, how runs ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning as L

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import RolloutBatch, StopReason, Trajectory


def rollout_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the trajectories of a batch; reward parts over those that have a reward."""
    n = max(1, len(trajectories))
    rewards = [t.reward for t in trajectories if t.reward is not None]
    scored = max(1, len(rewards))
    stops = Counter(t.stop_reason for t in trajectories)
    figures = {
        "reward": sum(r.total for r in rewards) / scored,
        "reward_format": sum(r.format for r in rewards) / scored,
        "reward_accuracy": sum(r.accuracy for r in rewards) / scored,
        "reward_query": sum(r.query for r in rewards) / scored,
        "accuracy": sum(r.accuracy for r in rewards) / scored,
        "turns": sum(len(t.steps) for t in trajectories) / n,
        "tool_calls": sum(t.n_tool_turns for t in trajectories) / n,
        "fatal_fraction": sum(t.is_fatal for t in trajectories) / n,
        "invalid_fraction": 1 - len(rewards) / n,
        "sampled_tokens": sum(float((t.step_ids >= 0).sum()) for t in trajectories) / n,
    }
    for reason in StopReason:
        figures[f"stop/{reason}"] = stops[reason] / n
    return figures


class ToolUseCurves(L.Callback):
    """Logs ``train/…``, ``val_greedy/…`` and ``val_sampled/…`` curves; reward, accuracy and turns in the progress bar.

    Args:
        prefix: of training figures; validation figures carry the name of their split.
    """

    def __init__(self, prefix: str = "train") -> None:
        self.prefix = prefix
        self._validation: dict[str, list[Trajectory]] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of the batch that is about to be trained on."""
        trajectories = _trajectories(batch)
        figures = rollout_figures(trajectories)
        lost = sum(group.n_lost for group in batch.groups)
        figures["lost_rollouts"] = float(lost)
        for name, value in figures.items():
            pl_module.log(
                f"{self.prefix}/{name}",
                value,
                prog_bar=name in ("reward", "accuracy", "turns"),
                on_step=True,
                on_epoch=False,
                batch_size=len(trajectories),
            )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the last validation."""
        self._validation.clear()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect: figures are means over all tasks of a split, however they were batched."""
        self._validation.setdefault(batch.split, []).extend(_trajectories(batch))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the figures of each split."""
        for split, trajectories in self._validation.items():
            for name, value in rollout_figures(trajectories).items():
                pl_module.log(f"{split}/{name}", value, prog_bar=name == "accuracy", batch_size=len(trajectories))


def _trajectories(batch: Any) -> list[Trajectory]:
    if not isinstance(batch, RolloutBatch) or not batch.groups:
        raise ConfigurationError(
            "ToolUseCurves found no trajectories in the batch; list RolloutGeneration before it in callbacks"
        )
    return [trajectory for group in batch.groups for trajectory in group.trajectories]
