"""Fatal-aware GRPO on finished trajectories (Eqs. 10-12).

Departures from the original GRPO: rewards and masks come with the trajectories; fatal ones keep their vote in the
group statistics but their negative advantages are clamped to zero; clip bounds are asymmetric; tokens after the kept
steps carry no gradient. The module knows no engine, tool or judge: it trains on whatever trajectories a batch brings.

Shapes: ``R`` trajectories of a batch, ``B`` of a micro-batch, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor, nn

from opensearch_lightning.algorithms import (
    Aggregation,
    Estimator,
    PolicyLoss,
    clamp_fatal_advantages,
    fatal_loss_mask,
    group_advantages,
    policy_loss,
)
from opensearch_lightning.chat import ModelBatch, collate
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.models import policy_logprobs
from opensearch_lightning.modules.accumulation import accumulate, agree_on_passes, check_optimizer, clip_and_step
from opensearch_lightning.modules.optim import adamw
from opensearch_lightning.strategies import prepare_engine
from opensearch_lightning.types import NON_FATAL, RolloutBatch, Trajectory

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True)
class AdvantageRecord:
    """What the batch's rewards became; callbacks read it from ``module.last_advantages``.

    All tensors are ``[R]`` in the order of ``trajectories``; ``group_ids`` number the tasks; rows with ``valid`` false
    have no reward and no vote.
    """

    trajectories: tuple[Trajectory, ...]
    group_ids: Tensor
    valid: Tensor
    is_fatal: Tensor
    kept_steps: Tensor
    raw: Tensor
    advantages: Tensor


class FatalAwareGRPO(L.LightningModule):
    """Trains ``policy`` on a :class:`~opensearch_lightning.types.RolloutBatch` whose groups are filled.

    Args:
        policy: a Qwen3-VL model of transformers.
        advantage: group estimator: ``"grpo"`` (mean and std) or ``"rloo"`` (leave-one-out mean).
        clamp_fatal: clamp negative advantages of fatal trajectories to zero (Eq. 11).
        clip: lower and upper clip distance of the token ratio.
        aggregation: how token losses become one number.
        lr: learning rate of the default AdamW; ignored when ``optimizer`` is given.
        optimizer: makes the optimizer from the policy.
        scheduler: makes a learning-rate scheduler from the optimizer; stepped once an update.
        mini_batch_prompts: prompts of one optimizer update; ``None`` takes the whole batch.
        max_tokens_per_micro_batch: padded tokens of one forward pass.
        old_logprobs: the denominator of the ratio: ``"sampling"`` takes the engine's log-probabilities (right when
            engine and trainer agree), ``"policy"`` computes them anew before the first update.
        max_grad_norm: global gradient norm limit, ``None`` for off.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        advantage: Estimator = "grpo",
        clamp_fatal: bool = True,
        clip: Sequence[float] = (0.2, 0.28),
        aggregation: Aggregation = "seq-mean-token-mean",
        lr: float = 1e-6,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        mini_batch_prompts: int | None = None,
        max_tokens_per_micro_batch: int = 74_576,
        old_logprobs: Literal["sampling", "policy"] = "sampling",
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__()
        if len(clip) != 2 or not 0 < clip[0] < 1 or not clip[1] > 0:
            raise ConfigurationError(f"clip is {clip!r}; give (low, high) with 0 < low < 1 and high > 0")
        if mini_batch_prompts is not None and mini_batch_prompts < 1:
            raise ConfigurationError(f"mini_batch_prompts is {mini_batch_prompts}; set at least 1, or null for all")
        for name, value, choices in (
            ("advantage", advantage, get_args(Estimator)),
            ("aggregation", aggregation, get_args(Aggregation)),
        ):
            if value not in choices:
                raise ConfigurationError(f"{name} is {value!r}; set one of {', '.join(choices)}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigurationError(f"max_grad_norm is {max_grad_norm}; set a norm above 0, or null for no limit")
        if old_logprobs not in ("sampling", "policy"):
            raise ConfigurationError(f'old_logprobs is {old_logprobs!r}; set "sampling" or "policy"')
        self.automatic_optimization = False
        self.policy = policy
        self.advantage: Estimator = advantage
        self.clamp_fatal = clamp_fatal
        self.clip_low, self.clip_high = float(clip[0]), float(clip[1])
        self.aggregation: Aggregation = aggregation
        self.mini_batch_prompts = mini_batch_prompts
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.old_logprobs = old_logprobs
        self.max_grad_norm = max_grad_norm
        self.last_advantages: AdvantageRecord | None = None
        self._make_optimizer = optimizer or (lambda model: adamw(model, lr=lr))
        self._make_scheduler = scheduler

    def setup(self, stage: str) -> None:
        """Tell a strategy that clips gradients itself how far."""
        prepare_engine(self.trainer, self.max_grad_norm)

    def configure_optimizers(self) -> Any:
        """The given optimizer, or AdamW; with its scheduler if one is given."""
        optimizer = self._make_optimizer(self.policy)
        check_optimizer(self.trainer, optimizer)
        if self._make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._make_scheduler(optimizer)}

    def on_fit_start(self) -> None:
        """Make the policy ready; checkpoints load in evaluation mode, where gradient checkpointing does nothing."""
        self.policy.train()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave records where they are: micro-batches move when they are collated."""
        return batch

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """One GRPO step: advantages over the groups, then one update for each mini-batch of prompts."""
        record = self.last_advantages = self.compute_advantages(batch)
        old = self._old_logprobs(record)
        updates = [self._update(record, rows, old) for rows in self._mini_batches(record)]
        figures = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        # before the first update the policy is the one that sampled: what differs from 1 here is engine against trainer
        figures["train/ratio_max_error"] = updates[0]["train/ratio_max_error"]
        self.log_dict(figures, on_step=True, on_epoch=False, batch_size=len(record.trajectories))

    def validation_step(self, batch: RolloutBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing to compute: the callbacks log what the rollouts of the batch show."""

    def compute_advantages(self, batch: RolloutBatch) -> AdvantageRecord:
        """Group advantages, then the clamp (App. B.2, Eq. 11).

        Raises:
            DataError: the batch holds no trajectories, or none with a reward.
        """
        trajectories = tuple(t for group in batch.groups for t in group.trajectories)
        if not trajectories:
            raise DataError(
                "the batch holds no trajectories: put RolloutGeneration before this module's training_step "
                "(callbacks=[…]), or fill batch.groups yourself"
            )
        if all(trajectory.reward is None for trajectory in trajectories):
            raise DataError(
                f"none of {len(trajectories)} trajectories has a reward, so there is nothing to train on; see why the "
                "judge fails (warnings above)"
            )
        numbers = {task_id: number for number, task_id in enumerate(dict.fromkeys(t.task_id for t in trajectories))}
        kept = [k for group in batch.groups for k in group.kept_steps or [NON_FATAL] * len(group.trajectories)]
        rewards = torch.tensor([t.reward.total if t.reward else 0.0 for t in trajectories], dtype=torch.float64)
        group_ids = torch.tensor([numbers[t.task_id] for t in trajectories])
        valid = torch.tensor([t.reward is not None for t in trajectories])
        is_fatal = torch.tensor([t.is_fatal for t in trajectories])
        raw = group_advantages(rewards, group_ids, estimator=self.advantage, valid_B=valid)
        advantages = clamp_fatal_advantages(raw, is_fatal) if self.clamp_fatal else raw
        return AdvantageRecord(
            trajectories=trajectories,
            group_ids=group_ids,
            valid=valid,
            is_fatal=is_fatal,
            kept_steps=torch.tensor(kept),
            raw=raw,
            advantages=advantages,
        )

    def _mini_batches(self, record: AdvantageRecord) -> Iterator[list[int]]:
        """Row indices of each update, whole groups together, in batch order; prompts without any reward make none."""
        n_groups = int(record.group_ids.max()) + 1
        size = self.mini_batch_prompts or n_groups
        for start in range(0, n_groups, size):
            inside = (record.group_ids >= start) & (record.group_ids < start + size) & record.valid
            rows = torch.nonzero(inside).flatten().tolist()
            if rows:
                yield rows

    def _update(self, record: AdvantageRecord, rows: list[int], old: dict[int, Tensor]) -> dict[str, float]:
        """One optimizer update over ``rows``, in micro-batches whose gradients add up to the whole's."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        denominator = self._denominator(record, rows)
        parts = self._parts(record, rows)
        loss, clipped, kept, worst = 0.0, 0.0, 0.0, 0.0
        for (micro, share), context in accumulate(self.trainer, parts):
            with context:
                result = self._micro_batch_loss(record, micro, old, denominator)
                # data parallel strategies average gradients over the ranks; their sum is wanted
                self.manual_backward(result.loss * self.trainer.world_size * share)
            if not share:
                continue
            loss += float(result.loss.detach())
            kept += float(result.n_tokens)
            clipped += float(result.clip_fraction * result.n_tokens)
            worst = max(worst, float(result.ratio_max_error))
        lr = optimizer.param_groups[0]["lr"]
        norm = clip_and_step(self.trainer, optimizer, self.policy.parameters(), self.max_grad_norm)
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/clip_fraction": clipped / max(kept, 1),
            "train/ratio_max_error": worst,
            "train/trained_tokens": kept,
        }

    def _parts(self, record: AdvantageRecord, rows: list[int]) -> list[tuple[list[int], int]]:
        """Micro-batches that count (1), and so many without weight (0) that all ranks make the passes they must."""
        micros = list(self._micro_batches(record, [row for row in rows if self._teaches(record, row)]))
        # at least one: the last backward pass carries the gradients between the ranks
        passes = agree_on_passes(self.trainer, max(1, len(micros)))
        return [(micro, 1) for micro in micros] + [(rows[:1], 0)] * (passes - len(micros))

    def _teaches(self, record: AdvantageRecord, row: int) -> bool:
        """Whether a row has a gradient: its advantage is not zero and its mask not empty.

        Equal rewards and clamped rows are common; they count in the denominators without being computed.
        """
        return bool(record.advantages[row] != 0) and self._kept_tokens(record, row) > 0

    @staticmethod
    def _kept_tokens(record: AdvantageRecord, row: int) -> int:
        steps = record.trajectories[row].step_ids
        return int(((steps >= 0) & (steps < record.kept_steps[row])).sum())

    def _denominator(self, record: AdvantageRecord, rows: list[int]) -> float:
        """Trajectories (or kept tokens) of this update on all ranks."""
        own = sum(self._kept_tokens(record, row) for row in rows) if self.aggregation == "token-mean" else len(rows)
        total: Any = self.trainer.strategy.reduce(torch.tensor(float(own), device=self.device), reduce_op="sum")
        return max(1.0, float(total))

    def _micro_batches(self, record: AdvantageRecord, rows: list[int]) -> Iterator[list[int]]:
        """Rows of similar lengths, ``max_tokens_per_micro_batch`` padded tokens at most (one row may exceed it)."""
        micro: list[int] = []
        for row in sorted(rows, key=lambda row: len(record.trajectories[row].token_ids)):
            width = len(record.trajectories[row].token_ids)
            if micro and (len(micro) + 1) * width > self.max_tokens_per_micro_batch:
                yield micro
                micro = []
            micro.append(row)
        if micro:
            yield micro

    def _micro_batch_loss(
        self, record: AdvantageRecord, rows: list[int], old: dict[int, Tensor], denominator: float
    ) -> PolicyLoss:
        samples = [record.trajectories[row] for row in rows]
        batch = self._collate(samples)
        mask_BT = fatal_loss_mask(batch.step_ids, record.kept_steps[rows].to(self.device))
        logprobs_BT, _ = policy_logprobs(self.policy, batch, mask_BT, temperature=_temperature(samples))
        old_BT = nn.utils.rnn.pad_sequence([old[row] for row in rows], batch_first=True).to(self.device)
        return policy_loss(
            logprobs_BT,
            old_BT,
            record.advantages[rows].to(self.device, logprobs_BT.dtype),
            mask_BT,
            self.clip_low,
            self.clip_high,
            aggregation=self.aggregation,
            denominator=denominator,
        )

    def _collate(self, samples: Sequence[Trajectory]) -> ModelBatch:
        config: Any = self.policy.config
        batch = collate(
            samples,
            # padding lies behind every real token, so any id will do
            pad_id=0,
            image_token_id=config.image_token_id,
            merge_size=config.vision_config.spatial_merge_size,
        )
        return batch.to(self.device)

    @torch.no_grad()
    def _old_logprobs(self, record: AdvantageRecord) -> dict[int, Tensor]:
        """Log-probabilities ``[T]`` of each row under the policy before this step's updates."""
        if self.old_logprobs == "sampling":
            return {row: t.sampling_logprobs for row, t in enumerate(record.trajectories)}
        old: dict[int, Tensor] = {}
        for micro in self._micro_batches(record, list(range(len(record.trajectories)))):
            samples = [record.trajectories[row] for row in micro]
            batch = self._collate(samples)
            logprobs_BT, _ = policy_logprobs(self.policy, batch, batch.step_ids >= 0, temperature=_temperature(samples))
            for position, row in enumerate(micro):
                old[row] = logprobs_BT[position, : len(record.trajectories[row].token_ids)].cpu()
        return old


def _temperature(samples: Sequence[Trajectory]) -> float:
    """The one temperature of a micro-batch; greedy rows are taken at 1."""
    temperatures = {t.temperature or 1.0 for t in samples}
    if len(temperatures) > 1:
        raise DataError(
            f"trajectories of one batch were sampled at temperatures {sorted(temperatures)}; sample a batch at one"
        )
    return temperatures.pop()
