"""Logs what the one-sided clamp does to the group advantages."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from opensearch_lightning.algorithms import clamp_bias
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.modules.tally import Tally
from opensearch_lightning.paths import check_file

if TYPE_CHECKING:
    from opensearch_lightning.modules.grpo import AdvantageRecord

COLUMNS = ("step", "task_id", "rollout", "fatal", "reward", "raw", "advantage")
"""Of the file of scores: ``raw`` is the group advantage before the clamp, ``advantage`` the one that is trained on."""


class ClampedAdvantageLogging(L.Callback):
    """After each training step: fraction of rows clamped, the clamp's bias, pre-clamp advantages of both kinds.

    Fraction and bias are 0 where the module does not clamp.

    Reads ``pl_module.last_advantages``, which :class:`~opensearch_lightning.modules.FatalAwareGRPO` sets.

    Args:
        path: CSV file of one row (:data:`COLUMNS`) for each trajectory that was scored, those of the first rank;
            ``step`` is the number of the training batch. A resumed run goes on behind its checkpoint; ``None``: none.

    Raises:
        ConfigurationError: ``path`` cannot be written; or the module has no advantages.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None:
            check_file("path", Path(path))
        self.path = None if path is None else Path(path)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of the step that was just made, over the rows of all ranks."""
        record = getattr(pl_module, "last_advantages", None)
        if record is None:
            raise ConfigurationError(
                f"{type(pl_module).__name__} has no advantages to log; use ClampedAdvantageLogging with FatalAwareGRPO"
            )
        tally = _counted(record, clamps=bool(pl_module.clamp_fatal))
        sums, _ = tally.over_ranks(trainer.strategy, trainer.strategy.root_device)
        pl_module.log_dict(_figures(sums), on_step=True, on_epoch=False, batch_size=1)
        if self.path is not None and trainer.is_global_zero:
            number = getattr(batch, "number", None)
            append_scores(self.path, record, batch_idx if number is None else number)


def _counted(record: AdvantageRecord, *, clamps: bool) -> Tally:
    raw, fatal, valid = record.raw, record.is_fatal & record.valid, record.valid
    bias = clamp_bias(raw, record.is_fatal & clamps, record.group_ids, valid_B=valid)
    groups = record.group_ids[valid].unique().tolist()
    equal = sum(bool((raw[(record.group_ids == group) & valid] == 0).all()) for group in groups)
    tally = Tally()
    tally.add(voters=valid.sum(), fatal=fatal.sum(), groups=len(groups), clamped=(raw != record.advantages).sum())
    tally.add(bias=sum(bias.values()), equal=equal, negative=(fatal & (raw < 0)).sum())
    tally.add(of_fatal=raw[fatal].sum(), of_others=raw[valid & ~fatal].sum())
    return tally


def _figures(sums: Mapping[str, float]) -> dict[str, float]:
    voters, fatal, groups = sums["voters"], sums["fatal"], sums["groups"]
    figures = {
        "train/clamped_fraction": sums["clamped"] / max(1, voters),
        "train/clamp_bias": sums["bias"] / max(1, groups),
        "train/equal_reward_fraction": sums["equal"] / max(1, groups),
        "train/fatal_negative_fraction": sums["negative"] / max(1, fatal),
    }
    if fatal:
        figures["train/advantage_fatal"] = sums["of_fatal"] / fatal
    if voters > fatal:
        figures["train/advantage_non_fatal"] = sums["of_others"] / (voters - fatal)
    return figures


def append_scores(path: Path, record: AdvantageRecord, step: int) -> None:
    """Put the scored rows of ``record`` behind those of earlier steps in the file, whose other rows are dropped.

    The file is replaced at once, so that a killed run leaves a readable one.
    """
    before = [row for row in _rows(path) if int(row[0]) < step] if step else []
    rows = zip(record.trajectories, record.is_fatal, record.raw, record.advantages, record.valid, strict=True)
    new = [
        (step, t.task_id, t.rollout, int(fatal), t.reward.total, f"{float(raw):.6g}", f"{float(advantage):.6g}")
        for t, fatal, raw, advantage, valid in rows
        if valid and t.reward is not None
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(before)
        writer.writerows(new)
    scratch.replace(path)


def _rows(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]
