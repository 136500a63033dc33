"""DeepSpeed's ZeRO under Lightning with manual optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.paths import put_in_place
from opensearch_lightning.strategies.checkpoints import check_continues

STAGES = (2, 3)


class _Precision(DeepSpeedPrecision):
    """Leaves batches as they are: rewards and sampled log-probabilities keep float32, records stay records."""

    def convert_input(self, data: Any) -> Any:
        return data


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy for ZeRO-2 and ZeRO-3, sharding early and resuming with care.

    Under ZeRO-3 each rank loads the policy into its main memory, and the parameters go to the device one by one, each
    only the rank's own part. DeepSpeed by itself moves the whole policy to every device first. So a machine of n ranks
    needs, until training begins, main memory for n policies (8 · 17 GB for an 8B policy in bfloat16), and no device
    ever holds more than its part.

    Takes the arguments of ``lightning.pytorch.strategies.DeepSpeedStrategy``.
    """

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the policy, then hand it to DeepSpeed."""
        precision: Any = self.precision_plugin.precision
        self.precision_plugin = _Precision(precision)
        self._init_config_if_needed()
        if self.zero_stage_3 and trainer.training:
            self._shard()
        super().setup(trainer)

    def _shard(self) -> None:
        import deepspeed

        assert self.model is not None and isinstance(self.config, dict)
        if self.config.get("bf16", {}).get("enabled"):
            # what is in parts already, DeepSpeed does not convert
            self.model.to(torch.bfloat16)
        deepspeed.zero.Init(module=self.model, config_dict_or_path=self.config)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save the parts of all ranks; until all are written, an older checkpoint of this name stays as it is."""
        target = Path(self.broadcast(filepath))
        partial = target.with_name(f".{target.name}.partial")
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        # nodes that do not share a disk have parts of their own; the others find nothing left to do
        for in_turn in (self.is_global_zero, self.local_rank == 0):
            if in_turn and partial.exists():
                put_in_place(partial, target)
            self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of this stage and number of ranks.

        Raises:
            ConfigurationError: it is no such folder.
        """
        if not (self.load_full_weights and self.zero_stage_3):
            check_continues(checkpoint_path, stage=zero_stage(self), world_size=self.world_size)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return loaded


def is_deepspeed(strategy: Any) -> bool:
    """Whether the strategy hands model and optimizer to DeepSpeed."""
    return isinstance(strategy, DeepSpeedStrategy)


def zero_stage(strategy: Any) -> int:
    """Stage of ZeRO; 0 under strategies other than DeepSpeed's."""
    if not is_deepspeed(strategy):
        return 0
    return int((strategy.config.get("zero_optimization") or {}).get("stage", 0))


def prepare_engine(trainer: L.Trainer, max_grad_norm: float | None) -> None:
    """Complete DeepSpeed's config: it clips at ``max_grad_norm``. To be called in a module's ``setup``.

    Does nothing under other strategies.

    Raises:
        ConfigurationError: a stage other than 2 and 3, or a ``gradient_clipping`` in DeepSpeed's config that differs.
    """
    strategy: Any = trainer.strategy
    if not is_deepspeed(strategy):
        return
    stage = zero_stage(strategy)
    if stage not in STAGES:
        raise ConfigurationError(
            f"zero_optimization.stage of the DeepSpeed config is {stage}, and an update of several backward passes is "
            "right under ZeRO 2 and 3 alone; set stage to 2 or 3, or train under DDP"
        )
    # DeepSpeed times samples by it, no more; Lightning would ask the loader, which may not know
    strategy.config.setdefault("train_micro_batch_size_per_gpu", 1)
    own = strategy.config.get("gradient_clipping")
    if max_grad_norm is None:
        return
    if own is not None and own != max_grad_norm:
        raise ConfigurationError(
            f"the module's max_grad_norm is {max_grad_norm} and gradient_clipping of the DeepSpeed config is {own}; "
            "set one of them, or both to one value"
        )
    strategy.config["gradient_clipping"] = max_grad_norm
