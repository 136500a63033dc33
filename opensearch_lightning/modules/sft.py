"""Supervised fine-tuning on expert trajectories (Eq. 8).

Shapes: ``B`` sequences, ``T`` tokens, ``S`` sources of the trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import policy_scores
from opensearch_lightning.modules.accumulation import accumulate, agree_on_passes, check_optimizer, clip_and_step
from opensearch_lightning.modules.optim import Schedule, adamw, warmup_schedule
from opensearch_lightning.modules.sft_parts import Part, as_sft_batch, filled_up, parts_of
from opensearch_lightning.modules.source_sums import SourceSums
from opensearch_lightning.strategies import prepare_engine

if TYPE_CHECKING:
    from torch.optim import Optimizer


class AgenticSFT(L.LightningModule):
    """Trains ``policy`` to say what the expert said: next-token cross-entropy on the policy's tokens.

    The loss of an update is the sum over its supervised tokens divided by their number in the global batch, over all
    ranks and micro-batches, so that neither the number of ranks nor the size of a micro-batch changes the gradient.
    One ``training_step`` is one update (manual optimization), so ``Trainer(max_steps=…)`` counts updates; accumulate
    with passes of the batch, or with ``micro_batch``, rather than with the Trainer.

    A batch is one pass, padded (``ModelBatch``) or packed (``PackedBatch``), or the passes of an update with the source
    of each row (``SFTBatch``, whose sources are the same on all ranks). Packed or padded, the loss is the same.

    Logs ``train/loss``, ``train/token_accuracy``, ``train/lr``, ``train/grad_norm`` (before clipping) and
    ``train/tokens`` (supervised tokens of the global batch); in validation ``val/loss`` and ``val/token_accuracy``.
    Where batches name several sources, also ``train/loss/<source>`` of those in the update, and ``val/loss/<source>``.

    Args:
        policy: a Qwen3-VL model of transformers.
        lr: learning rate of the default AdamW.
        optimizer: makes the optimizer from the policy, in place of that AdamW.
        schedule: course of the learning rate after the warm-up.
        warmup_ratio: warm-up as a fraction of all updates.
        total_steps: updates of the whole training; the Trainer's ``max_steps`` by default.
        micro_batch: most rows of a pass; larger padded ones are split. ``None`` takes them as they come, as packed ones
            always are. It serves DataModules that make one batch of an update: that of
            :class:`~opensearch_lightning.data.SearchVLSFTDataModule` has a ``micro_batch`` of its own, which pads less.
        max_grad_norm: limit of the global gradient norm, ``None`` for none; under DeepSpeed it becomes the
            ``gradient_clipping`` of its config.

    Raises:
        ConfigurationError: ``micro_batch`` below 1; at the start of training, a schedule without an end, or a
            DeepSpeed config that does not fit.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        lr: float = 2e-5,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        schedule: Schedule = "cosine",
        warmup_ratio: float = 0.1,
        total_steps: int | None = None,
        micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__()
        if micro_batch is not None and micro_batch < 1:
            raise ConfigurationError(f"micro_batch counts rows; got {micro_batch}, set at least 1, or null for all.")
        self.automatic_optimization = False
        self.policy = policy
        self.micro_batch = micro_batch
        self.max_grad_norm = max_grad_norm
        self._make_optimizer = optimizer or (lambda model: adamw(model, lr=lr))
        self._schedule: Schedule = schedule
        self._warmup_ratio, self._total_steps = warmup_ratio, total_steps

    def setup(self, stage: str) -> None:
        """Tell a strategy that clips gradients itself how far."""
        prepare_engine(self.trainer, self.max_grad_norm)

    def configure_optimizers(self) -> Any:
        """The optimizer with its schedule."""
        optimizer = self._make_optimizer(self.policy)
        check_optimizer(self.trainer, optimizer)
        scheduler = warmup_schedule(
            optimizer, schedule=self._schedule, warmup_ratio=self._warmup_ratio, total_steps=self._all_updates()
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_fit_start(self) -> None:
        """Make the policy ready; checkpoints load in evaluation mode, where gradient checkpointing does nothing."""
        self.policy.train()

    def training_step(self, batch: ModelBatch | PackedBatch | SFTBatch, batch_idx: int) -> None:
        """One update."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        rows = as_sft_batch(batch)
        parts = self._parts(rows)
        tokens = self._sum_over_ranks(torch.stack([part.supervised.sum() for part in parts if not part.idle]).sum())
        # Data parallel strategies average gradients over the ranks; the sum of losses is wanted.
        scale = self.trainer.world_size / tokens.clamp(min=1)
        table_S3 = torch.zeros(len(rows.sources), 3, dtype=torch.float64, device=self.device)
        for part, context in accumulate(self.trainer, parts):
            with context:
                nll, sums_S3 = self._sums(part, len(rows.sources))
                self.manual_backward(nll * scale)
            table_S3 += sums_S3
        norm = clip_and_step(self.trainer, optimizer, self.policy.parameters(), self.max_grad_norm)
        lr = optimizer.param_groups[0]["lr"]
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        means = _means("train", self._sum_over_ranks(table_S3), rows.sources)
        self._log_step(means | {"train/lr": lr, "train/grad_norm": norm, "train/tokens": float(tokens)})

    def on_validation_epoch_start(self) -> None:
        """Forget the sums of the validation before."""
        # made anew, as a strategy that converts the module to half precision would convert these sums too
        self._val_sums = SourceSums().to(self.device)

    def validation_step(self, batch: ModelBatch | PackedBatch | SFTBatch, batch_idx: int) -> None:
        """Add the sums of one batch."""
        rows = as_sft_batch(batch)
        for part in self._parts(rows):
            _, sums_S3 = self._sums(part, len(rows.sources))
            self._val_sums.update(sums_S3, rows.sources)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all supervised tokens of all ranks."""
        table_S3 = self._val_sums.compute()
        self.log_dict(_means("val", table_S3, self._val_sums.sources))

    def _sums(self, part: Part, n_sources: int) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood of a part with its gradient; table ``[S, 3]`` of it, right tokens and tokens."""
        mask_BT = part.supervised
        scores = policy_scores(self.policy, part.batch, mask_BT, with_greedy=True)
        right_BT = (scores.greedy == _tokens(part.batch)) & mask_BT
        columns = (-scores.logprobs.double(), right_BT, mask_BT)
        table_S3 = torch.stack([part.by_source(column_BT.sum(1), n_sources) for column_BT in columns], dim=1)
        return -scores.logprobs.sum() * (not part.idle), table_S3

    def _parts(self, batch: SFTBatch) -> list[Part]:
        """Parts that count, and so many idle ones that all ranks make equally many passes."""
        parts = parts_of(batch, self.micro_batch, self.policy.config)
        return filled_up(parts, agree_on_passes(self.trainer, len(parts)))

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value.to(torch.float64), reduce_op="sum")

    def _all_updates(self) -> int | None:
        if self._total_steps is not None or (self._schedule == "constant" and not self._warmup_ratio):
            return self._total_steps
        if self.trainer.max_steps >= 0:
            return self.trainer.max_steps
        updates = self.trainer.estimated_stepping_batches
        if not math.isfinite(updates):
            raise ConfigurationError(
                f"a {self._schedule} schedule needs an end: set Trainer(max_steps=…), or total_steps of the module."
            )
        return int(updates)

    def _log_step(self, values: dict[str, float]) -> None:
        # Lightning would log the last loss of a source again in each step that does not have the source
        results: Any = self.trainer._results or {}
        for key in [key for key in results if key.startswith("training_step.train/loss/")]:
            del results[key]
        self.log_dict(values, on_step=True, on_epoch=False)


def _tokens(batch: ModelBatch | PackedBatch) -> Tensor:
    """Ids ``[B, T]`` of each sequence; any on padding."""
    return batch.input_ids[0][batch.index_BT] if isinstance(batch, PackedBatch) else batch.input_ids


def _means(stage: str, table_S3: Tensor, sources: tuple[str, ...]) -> dict[str, float]:
    """Loss and accuracy of a supervised token, and the loss of each of several sources that has any."""
    nll, right, tokens = table_S3.sum(0).tolist()
    means = {f"{stage}/loss": nll / max(tokens, 1), f"{stage}/token_accuracy": right / max(tokens, 1)}
    if len(sources) > 1:
        rows = zip(sources, table_S3.tolist(), strict=True)
        means |= {f"{stage}/loss/{name}": own_nll / own for name, (own_nll, _, own) in rows if own}
    return means
