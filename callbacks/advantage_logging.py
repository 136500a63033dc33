"""Logs what the one-sided clamp does to the group advantages."""

from __future__ import annotations

from typing import Any

import lightning as L

from opensearch_lightning.algorithms import clamp_bias
from opensearch_lightning.errors import ConfigurationError


class ClampedAdvantageLogging(L.Callback):
    """After each training step: fraction of rows clamped, the clamp's bias, pre-clamp advantages of both kinds.

    Fraction and bias are 0 where the module does not clamp.

    Reads ``pl_module.last_advantages``, which :class:`~opensearch_lightning.modules.FatalAwareGRPO` sets.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of the step that was just made."""
        record = getattr(pl_module, "last_advantages", None)
        if record is None:
            raise ConfigurationError(
                f"{type(pl_module).__name__} has no advantages to log; use ClampedAdvantageLogging with FatalAwareGRPO"
            )
        raw, fatal, valid = record.raw, record.is_fatal & record.valid, record.valid
        voters = max(1, int(valid.sum()))
        clamped = record.is_fatal & bool(pl_module.clamp_fatal)
        bias = clamp_bias(raw, clamped, record.group_ids, valid_B=valid)
        groups = record.group_ids[valid].unique().tolist()
        equal = sum(bool((raw[(record.group_ids == group) & valid] == 0).all()) for group in groups)
        figures = {
            "train/clamped_fraction": float((record.raw != record.advantages).sum()) / voters,
            "train/clamp_bias": sum(bias.values()) / max(1, len(bias)),
            "train/equal_reward_fraction": equal / max(1, len(groups)),
            "train/fatal_negative_fraction": float((fatal & (raw < 0)).sum()) / max(1, int(fatal.sum())),
        }
        if bool(fatal.any()):
            figures["train/advantage_fatal"] = float(raw[fatal].mean())
        if bool((valid & ~fatal).any()):
            figures["train/advantage_non_fatal"] = float(raw[valid & ~fatal].mean())
        pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=voters)
