"""Supervised fine-tuning on expert trajectories (Eq. 8).

Shapes: ``B`` sequences, ``T`` tokens, ``N`` positions, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from opensearch_lightning.chat import ModelBatch
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import forbidden_token_ids, policy_logprobs
from opensearch_lightning.modules.accumulation import accumulate, agree_on_passes, check_optimizer, clip_and_step
from opensearch_lightning.modules.optim import Schedule, adamw, warmup_schedule
from opensearch_lightning.strategies import prepare_engine

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums over supervised tokens: negative log-likelihood (nats), tokens right under greedy decoding, tokens."""

    nll: Tensor
    right: Tensor
    tokens: Tensor

    def stacked(self) -> Tensor:
        return torch.stack([self.nll.double(), self.right.double(), self.tokens.double()])


class AgenticSFT(L.LightningModule):
    """Trains ``policy`` to say what the expert said: next-token cross-entropy on the policy's tokens.

    The loss of an update is the sum over its supervised tokens divided by their number in the global batch, over all
    ranks and micro-batches, so that neither the number of ranks nor the size of a micro-batch changes the gradient.
    One ``training_step`` is one update (manual optimization), so ``Trainer(max_steps=…)`` counts updates; accumulate
    with ``micro_batch`` rather than with the Trainer.

    Logs ``train/loss``, ``train/token_accuracy``, ``train/lr``, ``train/grad_norm`` (before clipping) and
    ``train/tokens`` (supervised tokens of the global batch); in validation ``val/loss`` and ``val/token_accuracy``.

    Args:
        policy: a Qwen3-VL model of transformers.
        lr: learning rate of the default AdamW.
        optimizer: makes the optimizer from the policy, in place of that AdamW.
        schedule: course of the learning rate after the warm-up.
        warmup_ratio: warm-up as a fraction of all updates.
        total_steps: updates of the whole training; the Trainer's ``max_steps`` by default.
        micro_batch: rows of one forward and backward pass; ``None`` takes the batch whole.
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
        self._val_sums = torch.zeros(3, dtype=torch.float64)

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

    def training_step(self, batch: ModelBatch, batch_idx: int) -> None:
        """One update."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        tokens = self._sum_over_ranks(_supervised(batch).sum())
        # Data parallel strategies average gradients over the ranks; the sum of losses is wanted.
        scale = self.trainer.world_size / tokens.clamp(min=1)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for (micro, share), context in accumulate(self.trainer, self._parts(batch)):
            with context:
                part = self._sums(micro)
                self.manual_backward(part.nll * scale * share)
            sums += part.stacked().detach() * share
        norm = clip_and_step(self.trainer, optimizer, self.policy.parameters(), self.max_grad_norm)
        lr = optimizer.param_groups[0]["lr"]
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        nll, right, _ = (self._sum_over_ranks(sums) / tokens.clamp(min=1)).tolist()
        self._log_step(loss=nll, token_accuracy=right, lr=lr, grad_norm=norm, tokens=float(tokens))

    def on_validation_epoch_start(self) -> None:
        """Forget the sums of the validation before."""
        self._val_sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: ModelBatch, batch_idx: int) -> None:
        """Add the sums of one batch."""
        for micro, share in self._parts(batch):
            self._val_sums = self._val_sums + self._sums(micro).stacked() * share

    def on_validation_epoch_end(self) -> None:
        """Log the means over all supervised tokens of all ranks."""
        nll, right, tokens = self._sum_over_ranks(self._val_sums).tolist()
        self.log_dict({"val/loss": nll / max(tokens, 1), "val/token_accuracy": right / max(tokens, 1)})

    def _sums(self, batch: ModelBatch) -> _Sums:
        mask_BT = _supervised(batch)
        with _greedy_tokens(self.policy) as greedy:
            logprobs_BT, _ = policy_logprobs(self.policy, batch, mask_BT)
        right = (torch.cat(greedy) == batch.input_ids[mask_BT]).sum()
        return _Sums(nll=-logprobs_BT.sum(), right=right, tokens=mask_BT.sum())

    def _parts(self, batch: ModelBatch) -> list[tuple[ModelBatch, int]]:
        """Micro-batches that count (1), and so many without weight (0) that all ranks make equally many passes."""
        size = self.micro_batch or len(batch.input_ids)
        micros = [batch] if size >= len(batch.input_ids) else list(split_rows(batch, size, self.policy.config))
        passes = agree_on_passes(self.trainer, len(micros))
        return [(micro, 1) for micro in micros] + [(micros[-1], 0)] * (passes - len(micros))

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

    def _log_step(self, **values: float) -> None:
        self.log_dict({f"train/{name}": value for name, value in values.items()}, on_step=True, on_epoch=False)


def split_rows(batch: ModelBatch, size: int, config: Any) -> Iterator[ModelBatch]:
    """Parts of ``size`` rows each, trimmed to their own longest row, with the images of their rows.

    Args:
        batch: batch padded on the right.
        size: rows of a part; the last may have fewer.
        config: the policy's configuration, which knows the image token and the merging of patches.
    """
    merged = config.vision_config.spatial_merge_size**2
    first_image = first_patch = 0
    for start in range(0, len(batch.input_ids), size):
        rows = slice(start, start + size)
        length = int(batch.valid[rows].sum(1).max())
        tokens = int((batch.input_ids[rows, :length] == config.image_token_id).sum())
        patches = slice(first_patch, first_patch + tokens * merged)
        grids = batch.image_grid_thw
        images = slice(first_image, first_image)
        if grids is not None:
            ends = grids.prod(-1).cumsum(0)
            images = slice(first_image, int((ends <= patches.stop).sum()))
        yield ModelBatch(
            input_ids=batch.input_ids[rows, :length],
            position_ids=batch.position_ids[:, rows, :length],
            step_ids=batch.step_ids[rows, :length],
            valid=batch.valid[rows, :length],
            pixel_values=batch.pixel_values[patches] if batch.pixel_values is not None and tokens else None,
            image_grid_thw=grids[images] if grids is not None and tokens else None,
        )
        first_image, first_patch = images.stop, patches.stop


def _supervised(batch: ModelBatch) -> Tensor:
    return batch.step_ids >= 0


@contextmanager
def _greedy_tokens(policy: Any) -> Iterator[list[Tensor]]:
    """Collects the likeliest token at each position that passes through the output layer, ``[N]`` a pass.

    The logits are large and gone after the loss; looking at them as they pass spares a second pass.
    """
    found: list[Tensor] = []
    forbidden = torch.tensor(forbidden_token_ids(policy.config), device=policy.device)

    def look(_module: nn.Module, _inputs: Any, logits_NV: Tensor) -> None:
        found.append(logits_NV.detach().index_fill(-1, forbidden, -math.inf).argmax(-1))

    handle = policy.get_output_embeddings().register_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()
