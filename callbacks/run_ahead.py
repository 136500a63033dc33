"""Rollouts that run ahead of the training, and batches made of those that are ready."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import lightning as L
import torch

from opensearch_lightning.callbacks.engine_weights import EngineWeights
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rollout import (
    AgentLoop,
    AsyncRollouts,
    OnStale,
    PendingGroup,
    ReplayBuffer,
    SamplingParams,
    TaskLedger,
)
from opensearch_lightning.rollout.ledger import TaskPlace
from opensearch_lightning.types import RolloutBatch, Task, Trajectory

T = TypeVar("T")


class RunAhead:
    """Keeps ``max_staleness + 1`` steps of tasks in the making, and fills each batch with groups that are ready.

    A step begins with the policy's weights copied to the engine, between two tokens of whatever runs; then as many
    tasks are submitted as the last step took away; then it takes its groups and trains while the rest goes on.

    The weights that train step ``n`` (from 0, the number of its batch) have version ``n``. The DataModule must know its
    order: ``train_batch(number)`` gives any batch. What was handed out and not trained goes into checkpoints, and is
    handed out again on resuming.

    Each rank makes and trains its own share of every batch of the data, on rollouts and with a ledger of its own. Ranks
    meet where the engine gets new weights, at the start of each step, and where a checkpoint takes all their ledgers.

    Args:
        agent: makes the trajectories.
        group_size: trajectories of a task.
        sampling: of every turn.
        max_staleness: 0 for none of this.
        on_stale: see :class:`~opensearch_lightning.rollout.ReplayBuffer`.
        max_parallel: rollouts at once.
    """

    def __init__(
        self,
        agent: AgentLoop,
        *,
        group_size: int,
        sampling: SamplingParams,
        max_staleness: int,
        on_stale: OnStale,
        max_parallel: int,
    ) -> None:
        self.max_staleness = max_staleness
        self._agent = agent
        self._weights = EngineWeights(agent.engine)
        self._settings: dict[str, Any] = {"group_size": group_size, "sampling": sampling, "max_parallel": max_parallel}
        self._on_stale: OnStale = on_stale
        self._rank, self._n_ranks = 0, 1
        # a setting that cannot work is refused here, and not by the first step
        self._new_rollouts()
        self._forget()

    def _new_rollouts(self) -> AsyncRollouts:
        buffer = ReplayBuffer(max_staleness=self.max_staleness, on_stale=self._on_stale)
        return AsyncRollouts(self._agent, buffer, **self._settings)

    def begin_fit(self, trainer: L.Trainer) -> None:
        """Nothing is handed out yet.

        Raises:
            ConfigurationError: rollouts are to run ahead, which engine or DataModule do not allow.
        """
        if self.max_staleness:
            self._check(trainer)
        self._rank, self._n_ranks = trainer.global_rank, trainer.world_size
        self._forget()

    def _forget(self) -> None:
        self._rollouts: AsyncRollouts | None = None
        self._ledger: TaskLedger | None = None
        self._source: Any = None
        self._in_step: tuple[int, list[TaskPlace]] = (-1, [])
        self._weights.forget()
        self._again: deque[TaskPlace] = deque()
        self._read: tuple[int, list[Task]] = (-1, [])

    @property
    def running(self) -> bool:
        """Whether rollouts run now."""
        return self._rollouts is not None

    def _check(self, trainer: L.Trainer) -> None:
        wish = f"max_staleness is {self.max_staleness}"
        if not getattr(self._agent.engine, "live_updates", False):
            raise ConfigurationError(
                f"{wish}, but the engine takes no new weights while rollouts run: set rollout.engine.own_weights=true "
                "and rollout.engine.reproducible=false (what runs ahead depends on timing and is never reproducible), "
                "or max_staleness=0"
            )
        source: Any = getattr(trainer, "datamodule", None)
        if not hasattr(source, "train_batch"):
            raise ConfigurationError(
                f"{wish}, but {type(source).__name__} cannot tell the batches to come; give it a train_batch(number), "
                "as SearchVLRLDataModule has, or set max_staleness=0"
            )

    def state(self) -> dict[str, Any]:
        """What was handed out and not trained, of every rank; to be called on all of them together.

        The groups of the running step count as trained by the DataModule's own count.
        """
        if self._ledger is None:
            return {}
        number, places = self._in_step
        trained = self._source is None or self._source.state_dict()["batches"] > number
        own = self._ledger.state(places if trained else ())
        ledgers = [own] * self._n_ranks
        if self._n_ranks > 1:
            torch.distributed.all_gather_object(ledgers, own)
        return {"run_ahead": ledgers}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned.

        Raises:
            ConfigurationError: it holds tasks to be trained, and nothing runs ahead in this fit, or it has another
                number of ranks, whose shares of the data are others.
        """
        ledgers = state.get("run_ahead")
        if ledgers is None:
            return
        n_open = sum(len(ledger["open"]) for ledger in ledgers)
        if not self.max_staleness:
            if not n_open:
                return
            raise ConfigurationError(
                f"the checkpoint was made with rollouts that run ahead and holds {n_open} tasks to be trained, which "
                "max_staleness=0 would leave out; go on with max_staleness=1 or more"
            )
        if len(ledgers) != self._n_ranks:
            raise ConfigurationError(
                f"the checkpoint holds what {len(ledgers)} ranks had handed out of their shares of the data, and this "
                f"run has {self._n_ranks}; resume with {len(ledgers)} (trainer.devices, trainer.num_nodes), or start "
                "from the checkpoint's weights alone"
            )
        self._ledger = TaskLedger.from_state(ledgers[self._rank])

    def fill(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> dict[str, float]:
        """Put the groups of this step into ``batch``; returns figures to log.

        Raises:
            ConfigurationError: the batch has no number.
            BaseException: what making a group raised.
        """
        if batch.number is None:
            raise ConfigurationError(
                "the batch has no number, so that rollouts cannot run ahead of it; have the DataModule set "
                "RolloutBatch.number, or set max_staleness=0"
            )
        if self._rollouts is None:
            self._begin(trainer, batch.number)
        rollouts, ledger, size = self._rollouts, self._ledger, len(batch.tasks)
        assert rollouts is not None and ledger is not None
        ledger.settle(self._in_step[1])
        self._weights.bring_to(pl_module, batch.number)
        left = math.inf if trainer.max_steps < 0 else trainer.max_steps - trainer.global_step
        while len(rollouts.buffer) < size * min(self.max_staleness + 1, left):
            place = self._again.popleft() if self._again else ledger.hand_out(size)
            rollouts.submit(self._pending(place))
        taken = rollouts.take(version=batch.number, size=size)
        ledger.settle(pending.place for pending in taken.dropped)
        self._in_step = batch.number, [pending.place for pending in taken.chosen]
        batch.tasks[:] = [pending.task for pending in taken.chosen]
        batch.groups[:] = [pending.group for pending in taken.chosen if pending.group is not None]
        return {
            **_staleness(batch, batch.number),
            "rollout/dropped_groups": float(len(taken.dropped)),
            "rollout/buffer_groups": float(rollouts.buffer.n_ready),
            "rollout/running_groups": float(len(rollouts.buffer) - rollouts.buffer.n_ready),
        }

    def run_beside(self, pl_module: Any, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a validation batch on the current weights, while the training rollouts go on with them too."""
        assert self._rollouts is not None
        self._weights.bring_to(pl_module, self._in_step[0] + 1)
        return self._rollouts.run(work)

    def stop(self) -> None:
        """Cancel what runs; what was handed out stays known."""
        if self._rollouts is not None:
            self._rollouts.stop()
            self._rollouts = None

    def _begin(self, trainer: L.Trainer, number: int) -> None:
        self._source = getattr(trainer, "datamodule", None)
        self._rollouts = self._new_rollouts()
        self._rollouts.start()
        if self._ledger is None:
            self._ledger = TaskLedger(number)
        self._again = deque(self._ledger.open)

    def _pending(self, place: TaskPlace) -> PendingGroup:
        number, index = place
        if self._read[0] != number:
            self._read = number, self._source.train_batch(number).tasks
        return PendingGroup(place=place, task=self._read[1][index])


def _staleness(batch: RolloutBatch, version: int) -> dict[str, float]:
    trajectories: Sequence[Trajectory] = [t for group in batch.groups for t in group.trajectories]
    ages = [version - t.weight_version for t in trajectories] or [0]
    spanning = sum(t.last_weight_version > t.weight_version for t in trajectories)
    return {
        "rollout/staleness_mean": sum(ages) / len(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/spanning_fraction": spanning / max(1, len(trajectories)),
    }
