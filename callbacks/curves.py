"""Logs what the rollouts of each batch show: reward, accuracy, turns, tool use, how runs ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning as L

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.modules.tally import Tally
from opensearch_lightning.types import RolloutBatch, StopReason, Trajectory, TrajectoryGroup

Figures = tuple[dict[str, float], int]
"""Means by name, and the number of trajectories they were taken over; of none they say nothing."""


def rollout_figures(trajectories: Sequence[Trajectory]) -> tuple[Figures, Figures]:
    """Means of the reward parts over the trajectories that have a reward, and of the other figures over all.

    ``accuracy`` is ``reward_accuracy`` under the name that validation and reports go by.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    scores = {
        "reward": _mean([r.total for r in rewards]),
        "reward_format": _mean([r.format for r in rewards]),
        "reward_accuracy": _mean([r.accuracy for r in rewards]),
        "reward_query": _mean([r.query for r in rewards]),
        "accuracy": _mean([r.accuracy for r in rewards]),
    }
    stops = Counter(t.stop_reason for t in trajectories)
    runs = {
        "turns": _mean([len(t.steps) for t in trajectories]),
        "tool_calls": _mean([t.n_tool_turns for t in trajectories]),
        "fatal_fraction": _mean([t.is_fatal for t in trajectories]),
        "invalid_fraction": _mean([t.reward is None for t in trajectories]),
        "sampled_tokens": _mean([int((t.step_ids >= 0).sum()) for t in trajectories]),
        **{f"stop/{reason}": stops[reason] / max(1, len(trajectories)) for reason in StopReason},
    }
    return (scores, len(rewards)), (runs, len(trajectories))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class ToolUseCurves(L.Callback):
    """Logs ``train/…``, ``val_greedy/…`` and ``val_sampled/…`` curves; reward, accuracy and turns in the progress bar.

    A batch in which no trajectory was scored logs neither reward nor accuracy, and one that lost all its rollouts only
    how many those were: a failing judge or engine never looks like a policy that got worse.

    Args:
        prefix: of training figures; validation figures carry the name of their split.
    """

    def __init__(self, prefix: str = "train") -> None:
        self.prefix = prefix
        self._validation: dict[str, list[TrajectoryGroup]] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of the batch that is about to be trained on, over the trajectories of all ranks."""
        groups = _filled(batch)
        scores, runs = rollout_figures(_trajectories(groups))
        tally = Tally()
        tally.add(scored=scores[1], trajectories=runs[1], lost_rollouts=_lost(groups))
        for figures, count in (scores, runs):
            tally.add(**{name: value * count for name, value in figures.items()})
        sums, _ = tally.over_ranks(trainer.strategy, trainer.strategy.root_device)
        for (figures, _), counted in ((scores, sums["scored"]), (runs, sums["trajectories"])):
            for name in figures if counted else ():
                shown = name in ("reward", "accuracy", "turns")
                self._log(pl_module, name, sums[name] / counted, prog_bar=shown)
        self._log(pl_module, "lost_rollouts", sums["lost_rollouts"])

    def _log(self, pl_module: L.LightningModule, name: str, value: float, *, prog_bar: bool = False) -> None:
        pl_module.log(f"{self.prefix}/{name}", value, prog_bar=prog_bar, on_step=True, on_epoch=False, batch_size=1)

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
        self._validation.setdefault(batch.split, []).extend(_filled(batch))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the figures of each split, over the trajectories of all ranks."""
        for split, groups in self._validation.items():
            for figures, count in rollout_figures(_trajectories(groups)):
                # Decided by all ranks together: one that logs what another leaves out would wait for it forever.
                if not trainer.strategy.reduce_boolean_decision(count > 0, all=False):
                    continue
                for name, value in figures.items():
                    pl_module.log(
                        f"{split}/{name}",
                        value,
                        prog_bar=name == "accuracy",
                        sync_dist=True,
                        # A float: Lightning rounds the mean of the ranks' counts down where they are whole numbers.
                        batch_size=float(count),  # type: ignore[arg-type]
                    )
            pl_module.log(f"{split}/lost_rollouts", _lost(groups), sync_dist=True, reduce_fx="sum", batch_size=1)


def _filled(batch: Any) -> list[TrajectoryGroup]:
    if not isinstance(batch, RolloutBatch) or not batch.groups:
        raise ConfigurationError(
            "ToolUseCurves found no trajectories in the batch; list RolloutGeneration before it in callbacks"
        )
    return batch.groups


def _trajectories(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _lost(groups: Sequence[TrajectoryGroup]) -> float:
    return float(sum(group.n_lost for group in groups))
