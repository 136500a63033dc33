"""Fatal-aware GRPO on finished trajectories (Eqs. 10-12).

Departures from the original GRPO: rewards and masks come with the trajectories; fatal ones keep their vote in the
group statistics but their negative advantages are clamped to zero; clip bounds are asymmetric; tokens after the kept
steps carry no gradient. The module knows no engine, tool or judge: it trains on whatever trajectories a batch brings.

Shapes: ``R`` trajectories of a batch, ``B`` of a pass (one forward and backward), ``T`` tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from opensearch_lightning.algorithms import (
    Aggregation,
    Baseline,
    Estimator,
    aggregate,
    clamp_fatal_advantages,
    fatal_loss_mask,
    group_advantages,
    kl_penalized_rewards,
    low_variance_kl,
    mismatch,
    policy_loss,
    truncated_importance_weights,
)
from opensearch_lightning.chat import PackedBatch
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.models import SequenceParallel, collect_router_logits, policy_logprobs, router_losses
from opensearch_lightning.modules.accumulation import accumulate, check_optimizer, clip_and_step
from opensearch_lightning.modules.grpo_settings import KLPlace, OldLogprobs, check_settings
from opensearch_lightning.modules.optim import adamw
from opensearch_lightning.modules.passes import (
    KnownLogprobs,
    Logprobs,
    Pass,
    pack_rows,
    padded,
    pass_tokens,
    plan_passes,
    sampling_logprobs,
    score_rows,
)
from opensearch_lightning.modules.reference import attach_reference
from opensearch_lightning.modules.rollout_rows import AdvantageRecord, RolloutRows
from opensearch_lightning.modules.sequence_parallel import joined_rollouts
from opensearch_lightning.modules.tally import Tally, over_updates
from opensearch_lightning.strategies import prepare_engine
from opensearch_lightning.types import RolloutBatch

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class FatalAwareGRPO(L.LightningModule):
    """Trains ``policy`` on a :class:`~opensearch_lightning.types.RolloutBatch` whose groups are filled.

    Several processes give the gradients of one: every mean is over the rows or tokens of all ranks, however they are
    spread and cut into passes.

    Args:
        policy: a Qwen3-VL model of transformers.
        reference: model that the policy is held to by ``kl_coefficient``; frozen, and no part of checkpoints
            (but of DeepSpeed's). With a coefficient of 0 the divergence is only logged.
        advantage: group estimator: ``"grpo"`` (mean and std) or ``"rloo"`` (leave-one-out mean).
        normalize_std: divide by the std of the group (``"grpo"`` only).
        baseline: whose rewards make the group's statistics: ``"all"`` trajectories, or the ``"non_fatal"`` alone.
        clamp_fatal: clamp negative advantages of fatal trajectories to zero (Eq. 11).
        clip: lower and upper clip distance of the token ratio.
        aggregation: how token losses become one number.
        kl_coefficient: ``β`` of Eq. 12.
        kl_in: whether the penalty stands in the ``"loss"`` (low-variance estimate) or is taken off the ``"reward"``.
        entropy_coefficient: weight of the policy's entropy, which is sought.
        importance_cap: largest weight of a token by which truncated importance sampling makes up for an engine that
            differs from the trainer; needs ``old_logprobs="policy"``; ``None`` for no correction.
        router_aux_coefficient: weight of the load-balancing loss of a mixture of experts.
        router_z_coefficient: weight of its router z-loss.
        lr: learning rate of the default AdamW; ignored when ``optimizer`` is given.
        optimizer: makes the optimizer from the policy.
        scheduler: makes a learning-rate scheduler from the optimizer; stepped once an update.
        mini_batch_prompts: prompts of one optimizer update, all ranks together; ``None`` takes the whole batch.
        max_tokens_per_micro_batch: tokens of one pass, prompts that rollouts share counted once; a longer trajectory
            has a pass of its own.
        old_logprobs: the denominator of the ratio: ``"sampling"`` takes the engine's log-probabilities (right when
            engine and trainer agree and rollouts are on policy), ``"policy"`` computes them before the first update.
        max_grad_norm: global gradient norm limit, ``None`` for off.
        sequence_parallel_size: neighbouring ranks that share each pass, its row split between them; 1 for none. They
            train on the trajectories of all of them.

    Raises:
        ConfigurationError: a setting that cannot work; the message names it.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        reference: nn.Module | None = None,
        advantage: Estimator = "grpo",
        normalize_std: bool = True,
        baseline: Baseline = "all",
        clamp_fatal: bool = True,
        clip: Sequence[float] = (0.2, 0.28),
        aggregation: Aggregation = "seq-mean-token-mean",
        kl_coefficient: float = 0.0,
        kl_in: KLPlace = "loss",
        entropy_coefficient: float = 0.0,
        importance_cap: float | None = None,
        router_aux_coefficient: float = 0.0,
        router_z_coefficient: float = 0.0,
        lr: float = 1e-6,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        mini_batch_prompts: int | None = None,
        max_tokens_per_micro_batch: int = 74_576,
        old_logprobs: OldLogprobs = "sampling",
        max_grad_norm: float | None = 1.0,
        sequence_parallel_size: int = 1,
    ) -> None:
        super().__init__()
        if len(clip) != 2 or not 0 < clip[0] < 1 or not clip[1] > 0:
            raise ConfigurationError(f"clip is {clip!r}; give (low, high) with 0 < low < 1 and high > 0")
        if reference is not None and reference is policy:
            raise ConfigurationError("reference is the policy itself, which would move with it; load it a second time")
        self.automatic_optimization = False
        self.policy = policy
        self.reference: nn.Module | None = None
        if reference is not None:
            attach_reference(self, reference)
        self.advantage: Estimator = advantage
        self.normalize_std = normalize_std
        self.baseline: Baseline = baseline
        self.clamp_fatal = clamp_fatal
        self.clip_low, self.clip_high = float(clip[0]), float(clip[1])
        self.aggregation: Aggregation = aggregation
        self.kl_coefficient = kl_coefficient
        self.kl_in: KLPlace = kl_in
        self.entropy_coefficient = entropy_coefficient
        self.importance_cap = importance_cap
        self.router_aux_coefficient = router_aux_coefficient
        self.router_z_coefficient = router_z_coefficient
        self.mini_batch_prompts = mini_batch_prompts
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.old_logprobs: OldLogprobs = old_logprobs
        self.max_grad_norm = max_grad_norm
        self.sequence_parallel_size = sequence_parallel_size
        self._parallel: SequenceParallel | None = None
        self.last_advantages: AdvantageRecord | None = None
        self._make_optimizer = optimizer or (lambda model: adamw(model, lr=lr))
        self._make_scheduler = scheduler
        check_settings(self)

    # --- hooks of Lightning -------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Tell a strategy that clips gradients itself how far, and group the ranks that share rows."""
        prepare_engine(self.trainer, self.max_grad_norm)
        if stage == "fit" and self.sequence_parallel_size > 1:
            self._parallel = SequenceParallel(self.sequence_parallel_size)
            for model in (self.policy, self.reference):
                if model is not None:
                    self._parallel.check_heads(model.config)

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
        if self.reference is not None:
            self.reference.eval()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave records where they are: passes move when they are packed."""
        return batch

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """One GRPO step: advantages over the groups, then one update for each mini-batch of prompts."""
        if self._parallel is not None:
            batch = joined_rollouts(batch, self._parallel, self.trainer)
        rows = RolloutRows.of(batch)
        known = self._known_logprobs(rows)
        record = self.last_advantages = self._advantages(rows, self._rewards(rows, known))
        updates = [self._update(rows, record, known, chosen) for chosen in self._mini_batches(rows)]
        figures = over_updates(updates)
        self.log_dict(figures, on_step=True, on_epoch=False, batch_size=len(rows.trajectories))

    def validation_step(self, batch: RolloutBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing to compute: the callbacks log what the rollouts of the batch show."""

    # --- rewards and advantages ---------------------------------------------------------------------------------

    def compute_advantages(self, batch: RolloutBatch) -> AdvantageRecord:
        """Group advantages of the rewards as they are, then the clamp (App. B.2, Eq. 11).

        Raises:
            DataError: the batch holds no trajectories.
        """
        rows = RolloutRows.of(batch)
        return self._advantages(rows, rows.rewards)

    def _advantages(self, rows: RolloutRows, rewards: Tensor) -> AdvantageRecord:
        raw = group_advantages(
            rewards,
            rows.group_ids,
            estimator=self.advantage,
            valid_B=rows.valid,
            normalize_std=self.normalize_std,
            baseline=self.baseline,
            is_fatal_B=rows.is_fatal,
        )
        return AdvantageRecord(
            trajectories=rows.trajectories,
            group_ids=rows.group_ids,
            valid=rows.valid,
            is_fatal=rows.is_fatal,
            kept_steps=rows.kept_steps,
            raw=raw,
            advantages=clamp_fatal_advantages(raw, rows.is_fatal) if self.clamp_fatal else raw,
        )

    def _rewards(self, rows: RolloutRows, known: KnownLogprobs) -> Tensor:
        """Rewards, less the divergence from the reference where the penalty stands there."""
        if known.reference is None or self.kl_in == "loss" or not self.kl_coefficient:
            return rows.rewards
        steps = padded([t.step_ids for t in rows.trajectories], -1)
        every = range(len(rows.trajectories))
        return kl_penalized_rewards(
            rows.rewards,
            padded([known.old[row] for row in every]),
            padded([known.reference[row] for row in every]),
            # all that was sampled: a penalty that stops at the fatal step would favour those that have one
            steps >= 0,
            self.kl_coefficient,
        )

    def _mini_batches(self, rows: RolloutRows) -> Iterator[list[int]]:
        """Rows of each update, whole groups together, in batch order.

        Every rank makes the same updates: its groups are dealt evenly to as many as all prompts need, and an update
        without a reward on any rank is left out on all.

        Raises:
            DataError: no trajectory of any rank has a reward.
        """
        n_groups, n_updates = rows.n_groups, 1
        if self.mini_batch_prompts is not None:
            n_updates = math.ceil(self._over_ranks(n_groups) / self.mini_batch_prompts)
        bounds = [n_groups * number // n_updates for number in range(n_updates + 1)]
        found = False
        for first, end in itertools.pairwise(bounds):
            inside = (rows.group_ids >= first) & (rows.group_ids < end) & rows.valid
            chosen = torch.nonzero(inside).flatten().tolist()
            if self._over_ranks(len(chosen)):
                found = True
                yield chosen
        if not found:
            raise DataError(
                f"none of {len(rows.trajectories)} trajectories has a reward, so there is nothing to train on; see why "
                "the judge fails (warnings above)"
            )

    # --- one update ---------------------------------------------------------------------------------------------

    def _update(
        self, rows: RolloutRows, record: AdvantageRecord, known: KnownLogprobs, chosen: list[int]
    ) -> dict[str, float]:
        """One optimizer update over ``chosen``, in passes whose gradients add up to the whole's."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        passes = self._plan(rows, [row for row in chosen if self._teaches(rows, record, row)])
        whole = _Whole(
            denominator=self._denominator(rows, chosen),
            n_tokens=max(1.0, self._over_ranks(sum(pass_tokens(rows, one) for one in passes))),
        )
        tally = Tally()
        if known.reference is not None and not self._kl_teaches:
            tally.add(kl=self._watched_kl(rows, known, chosen, whole.denominator))
        for one, context in accumulate(self.trainer, passes):
            with context:
                loss = self._pass_loss(rows, record, known, one, whole, tally)
                # data parallel strategies average gradients over the ranks; their sum is wanted
                self.manual_backward(loss * self.trainer.world_size)
        norm = clip_and_step(self.trainer, optimizer, self.policy.parameters(), self.max_grad_norm)
        lr = optimizer.param_groups[0]["lr"]
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        return {**self._figures(tally), "train/grad_norm": norm, "train/lr": lr}

    def _pass_loss(
        self,
        rows: RolloutRows,
        record: AdvantageRecord,
        known: KnownLogprobs,
        one: Pass,
        whole: _Whole,
        tally: Tally,
    ) -> Tensor:
        """Loss of one pass, to be summed over all of them."""
        batch = pack_rows(rows, one.rows, self.policy, self.device)
        mask_BT = fatal_loss_mask(batch.step_ids, rows.kept_steps[one.rows].to(self.device)) & (not one.idle)
        old_BT = self._padded(known.old, one.rows)
        with self._collect_router_logits() as router_logits:
            logprobs_BT, entropy_BT = policy_logprobs(
                self.policy,
                batch,
                mask_BT,
                temperature=rows.temperature,
                with_entropy=True,
                sequence_parallel=self._parallel,
            )
        assert entropy_BT is not None
        result = policy_loss(
            logprobs_BT,
            old_BT,
            record.advantages[one.rows].to(self.device, logprobs_BT.dtype),
            mask_BT,
            self.clip_low,
            self.clip_high,
            aggregation=self.aggregation,
            denominator=whole.denominator,
            ref_logprobs_BT=None if known.reference is None else self._padded(known.reference, one.rows),
            kl_coefficient=self.kl_coefficient if self.kl_in == "loss" else 0.0,
            entropy_BT=entropy_BT if self.entropy_coefficient else entropy_BT.detach(),
            entropy_coefficient=self.entropy_coefficient,
            importance_weights_BT=self._importance_weights(known, one, old_BT, mask_BT, tally),
        )
        loss = result.loss
        if self._uses_routers:
            loss = loss + self._router_loss(router_logits, batch, pass_tokens(rows, one) / whole.n_tokens, tally)
        tally.add(
            loss=loss.detach(),
            tokens=result.n_tokens,
            clipped=result.clip_fraction * result.n_tokens,
            entropy=entropy_BT.detach().sum(),
        )
        if self._kl_teaches:
            tally.add(kl=result.kl)
        tally.raise_to(ratio_max_error=result.ratio_max_error)
        return loss

    def _importance_weights(
        self, known: KnownLogprobs, one: Pass, old_BT: Tensor, mask_BT: Tensor, tally: Tally
    ) -> Tensor | None:
        """Weights that make up for the engine's difference, where they are asked for; notes how large it is."""
        if self.old_logprobs != "policy":
            return None
        sampling_BT = self._padded(known.sampling, one.rows)
        apart = mismatch(old_BT, sampling_BT, mask_BT)
        tally.add(mismatch=apart.absolute, mismatch_kl=apart.kl)
        tally.raise_to(mismatch_max=apart.largest)
        if self.importance_cap is None:
            return None
        weights_BT = truncated_importance_weights(old_BT, sampling_BT, mask_BT, self.importance_cap)
        tally.add(capped=(weights_BT == self.importance_cap).sum())
        return weights_BT

    def _figures(self, tally: Tally) -> dict[str, float]:
        """What an update logs, over all ranks."""
        sums, highest = tally.over_ranks(self.trainer.strategy, self.device)
        # each rank of a group has counted its rows
        sums = {name: total / self.sequence_parallel_size for name, total in sums.items()}
        tokens = max(sums["tokens"], 1.0)
        figures = {
            "train/loss": sums["loss"],
            "train/trained_tokens": sums["tokens"],
            "train/clip_fraction": sums["clipped"] / tokens,
            "train/entropy": sums["entropy"] / tokens,
            "train/ratio_max_error": highest["ratio_max_error"],
        }
        if self.old_logprobs == "policy":
            figures["train/mismatch"] = sums["mismatch"] / tokens
            figures["train/mismatch_kl"] = sums["mismatch_kl"] / tokens
            figures["train/mismatch_max"] = highest["mismatch_max"]
        if self.importance_cap is not None:
            figures["train/importance_capped"] = sums["capped"] / tokens
        if self.reference is not None:
            figures["train/kl"] = sums["kl"]
        if self._uses_routers:
            figures["train/router_aux"], figures["train/router_z"] = sums["router_aux"], sums["router_z"]
        return figures

    @property
    def _kl_teaches(self) -> bool:
        return bool(self.kl_coefficient and self.kl_in == "loss")

    def _watched_kl(self, rows: RolloutRows, known: KnownLogprobs, chosen: Sequence[int], denominator: float) -> Tensor:
        """Divergence of the policy before the update, where none is in the loss: of all rows, also without a pass."""
        if not chosen or known.reference is None:
            return torch.zeros(())
        steps = padded([rows.trajectories[row].step_ids for row in chosen], -1)
        values = low_variance_kl(
            padded([known.old[row] for row in chosen]), padded([known.reference[row] for row in chosen])
        )
        mask = fatal_loss_mask(steps, rows.kept_steps[list(chosen)])
        return aggregate(values, mask, self.aggregation, denominator)

    @property
    def _uses_routers(self) -> bool:
        return bool(self.router_aux_coefficient or self.router_z_coefficient)

    def _collect_router_logits(self) -> AbstractContextManager[list[Tensor]]:
        return collect_router_logits(self.policy) if self._uses_routers else nullcontext([])

    def _router_loss(self, logits: list[Tensor], batch: PackedBatch, share: float, tally: Tally) -> Tensor:
        """Losses of the routers in a pass, means over its tokens, times the pass's share of the trained tokens."""
        policy: Any = self.policy
        config = policy.config.text_config
        everything = torch.ones_like(batch.input_ids, dtype=torch.bool)
        losses = router_losses(logits, config.num_experts, config.num_experts_per_tok, everything)
        aux, z = (share * total / losses.tokens for total in (losses.load_balancing_sum, losses.z_sum))
        tally.add(router_aux=aux.detach(), router_z=z.detach())
        return self.router_aux_coefficient * aux + self.router_z_coefficient * z

    def _teaches(self, rows: RolloutRows, record: AdvantageRecord, row: int) -> bool:
        """Whether a row has a gradient: its mask is not empty, and its advantage or another term not zero.

        Equal rewards and clamped rows are common; they count in the denominators without being computed.
        """
        others = self.entropy_coefficient or self._kl_teaches or self._uses_routers
        return bool(others or record.advantages[row] != 0) and rows.kept_tokens(row) > 0

    def _denominator(self, rows: RolloutRows, chosen: list[int]) -> float:
        """Trajectories (or kept tokens) of this update on all ranks."""
        own = sum(rows.kept_tokens(row) for row in chosen) if self.aggregation == "token-mean" else len(chosen)
        return max(1.0, self._over_ranks(own))

    def _over_ranks(self, count: float) -> float:
        """The sum over ranks, where each rank of a group counts what is the group's."""
        total: Any = self.trainer.strategy.reduce(
            torch.tensor(float(count), dtype=torch.float64, device=self.device), reduce_op="sum"
        )
        return float(total) / self.sequence_parallel_size

    # --- passes -------------------------------------------------------------------------------------------------

    def _plan(self, rows: RolloutRows, chosen: Sequence[int]) -> list[Pass]:
        return plan_passes(rows, chosen, self.max_tokens_per_micro_batch, self.policy, self.trainer)

    def _padded(self, logprobs: Logprobs, chosen: Sequence[int]) -> Tensor:
        return padded([logprobs[row] for row in chosen]).to(self.device)

    def _known_logprobs(self, rows: RolloutRows) -> KnownLogprobs:
        sampling = sampling_logprobs(rows)
        old, reference = sampling, None
        if self.old_logprobs == "policy" or self.reference is not None:
            passes = self._plan(rows, range(len(rows.trajectories)))
            if self.old_logprobs == "policy":
                old = score_rows(self.policy, rows, passes, self.device, self._parallel)
            if self.reference is not None:
                reference = score_rows(self.reference, rows, passes, self.device, self._parallel)
        return KnownLogprobs(old=old, sampling=sampling, reference=reference)


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What the parts of an update are divided by: trajectories (or kept tokens) and kept tokens of all ranks."""

    denominator: float
    n_tokens: float
