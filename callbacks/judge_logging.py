"""Owns the judges' life and logs what they did and cost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L

from opensearch_lightning.rewards import JudgeMetrics
from opensearch_lightning.rollout import Reward
from opensearch_lightning.types import Closable


@runtime_checkable
class _Metered(Protocol):
    """A judge that counts what it does."""

    def drain(self) -> JudgeMetrics: ...


@runtime_checkable
class _Judged(Protocol):
    """A reward that names its judges."""

    @property
    def judges(self) -> Mapping[str, object]: ...


class JudgeLogging(L.Callback):
    """Logs calls, cache hits, retries, failures by kind, tokens, cost and latencies of every model judge, step by step.

    A step's figures are all that was judged since the step before, validation included: what was paid for is in them
    once. ``cost_total`` adds up the steps of this process. Judges that ask no model have nothing to log. With a judge
    of visual actions, ``train/reward_visual`` is its mean score over the trajectories that it was asked about.

    Args:
        reward: the one that RolloutGeneration was given; what its judges hold open is closed at the end.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        judges = reward.judges.items() if isinstance(reward, _Judged) else ()
        self._judges = {role: judge for role, judge in judges if isinstance(judge, _Metered)}
        self._spent = dict.fromkeys(self._judges, 0.0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures since the step before."""
        figures: dict[str, float] = {}
        for role, judge in self._judges.items():
            metrics = judge.drain()
            figures |= {f"judges/{role}/{name}": value for name, value in _figures(metrics).items()}
            if metrics.cost is not None:
                self._spent[role] += metrics.cost
                figures[f"judges/{role}/cost_total"] = self._spent[role]
        visual = [t.reward.visual for group in batch.groups for t in group.trajectories if t.reward is not None]
        if scores := [score for score in visual if score is not None]:
            figures["train/reward_visual"] = sum(scores) / len(scores)
        pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close, for a run that stops early is not torn down."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Cancel what runs and close connections and files."""
        self._close()

    def _close(self) -> None:
        if isinstance(self.reward, Closable):
            asyncio.run(self.reward.aclose())


def _figures(metrics: JudgeMetrics) -> dict[str, float]:
    """What there is to log, by name."""
    figures: dict[str, float | None] = {
        "calls": metrics.calls,
        "cache_hits": metrics.cache_hits,
        "requests": metrics.requests,
        "retries": metrics.retries,
        "unreadable": metrics.unreadable,
        "input_tokens": metrics.input_tokens,
        "output_tokens": metrics.output_tokens,
        "cost": metrics.cost,
        "latency_p50_s": metrics.latency_p50_s,
        "latency_p95_s": metrics.latency_p95_s,
        **{f"failures/{kind}": count for kind, count in metrics.failures.items()},
    }
    return {name: float(value) for name, value in figures.items() if value is not None}
