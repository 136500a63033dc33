"""Fills each batch with trajectories of the current policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import lightning as L

from opensearch_lightning.callbacks.engine_weights import EngineWeights
from opensearch_lightning.callbacks.run_ahead import RunAhead
from opensearch_lightning.errors import ConfigurationError, DataError, RolloutLost
from opensearch_lightning.rollout import (
    AgentLoop,
    EngineStats,
    IncompleteGroups,
    OnStale,
    Reward,
    RolloutEngine,
    SamplingParams,
    check_room,
)
from opensearch_lightning.strategies import zero_stage
from opensearch_lightning.tools import ToolExecutor
from opensearch_lightning.types import Closable, ErrorKind, RolloutBatch, TrajectoryGroup

DEFAULT_SYSTEM_PROMPT = (
    "Answer the question about the picture. Think in <think></think>, then either call one tool in "
    "<tool_call></tool_call> or give the short answer in <response></response>."
)


class RolloutGeneration(L.Callback):
    """Before each training step and validation batch: bring the engine to the policy's weights, run the agent, score.

    ``batch.groups`` is filled in place. Training rollouts of a task that comes again are numbered on, so that noise and
    injected faults are new; validation always sees the same ones, so that its curve compares like with like.

    With ``max_staleness`` 0 a step rolls out its own tasks and waits for all of them. Above 0 rollouts run in a thread
    of their own and ahead of the training, which takes the groups that are ready: ``batch.tasks`` and ``batch.groups``
    become theirs. Every task is trained once all the same, also over a resumed checkpoint; see
    :class:`~opensearch_lightning.callbacks.run_ahead.RunAhead`.

    Args:
        engine: samples turns.
        executor: carries out tool calls.
        reward: scores each trajectory as it ends.
        group_size: trajectories of one training task.
        fatal_k, fatal_onset, counted_errors: what is fatal; see :class:`~opensearch_lightning.rollout.AgentLoop`.
        system_prompt, render_tools, tell_image_sizes, max_turns, max_response_tokens: likewise.
        max_turn_tokens: tokens of one turn.
        temperature, top_p, top_k: of training rollouts.
        val_top_p: of sampled validation rollouts, at the same temperature; ``val_greedy`` batches are greedy.
        seed: keys the sampling noise.
        max_staleness: steps of training that may lie between the weights of a trajectory's first token and those that
            it trains; above 0 the engine must take new weights while rollouts run.
        on_stale: what becomes of a group that would grow older: the step waits for it, or it is dropped and counted.
        max_parallel_rollouts: training rollouts at once, where they run ahead.
        incomplete_groups, rollout_timeout_s: what becomes of lost and of slow rollouts; see
            :class:`~opensearch_lightning.rollout.AgentLoop`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        executor: ToolExecutor,
        reward: Reward,
        *,
        group_size: int = 8,
        fatal_k: int = 3,
        fatal_onset: Literal["first", "threshold"] = "first",
        counted_errors: Collection[str] = tuple(ErrorKind),
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        render_tools: bool = True,
        tell_image_sizes: bool = False,
        max_turns: int = 50,
        max_response_tokens: int = 70_000,
        max_turn_tokens: int = 8_192,
        temperature: float = 0.7,
        top_p: float = 1.0,
        top_k: int = 0,
        val_top_p: float = 1.0,
        seed: int = 3407,
        max_staleness: int = 0,
        on_stale: OnStale = "wait",
        max_parallel_rollouts: int = 256,
        incomplete_groups: IncompleteGroups = "retry",
        rollout_timeout_s: float | None = None,
    ) -> None:
        if group_size < 2:
            raise ConfigurationError(
                f"group_size is {group_size}, and a group of one teaches nothing; set at least 2 (8 in the recipe)"
            )
        if temperature == 0:
            raise ConfigurationError(
                "temperature is 0, so the rollouts of a group would all be equal and teach nothing; set it above 0 "
                "(0.7 in the recipe)"
            )
        self.engine = engine
        self.group_size = group_size
        self.loop = AgentLoop(
            engine,
            executor,
            system_prompt=system_prompt,
            render_tools=render_tools,
            tell_image_sizes=tell_image_sizes,
            max_turns=max_turns,
            max_response_tokens=max_response_tokens,
            fatal_k=fatal_k,
            fatal_onset=fatal_onset,
            counted_errors=counted_errors,
            reward=reward,
            incomplete_groups=incomplete_groups,
            rollout_timeout_s=rollout_timeout_s,
        )
        limits = {"max_turn_tokens": max_turn_tokens, "seed": seed}
        self.sampling = {
            "train": SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, **limits),
            "val_sampled": SamplingParams(temperature=temperature, top_p=val_top_p, **limits),
            "val_greedy": SamplingParams(temperature=0.0, **limits),
        }
        self.run_ahead = RunAhead(
            self.loop,
            group_size=group_size,
            sampling=self.sampling["train"],
            max_staleness=max_staleness,
            on_stale=on_stale,
            max_parallel=max_parallel_rollouts,
        )
        self._runner: asyncio.Runner | None = None
        self._weights = EngineWeights(engine)
        self._clock = EngineClock(engine)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the module trains a policy that the engine can be brought to."""
        if not hasattr(pl_module, "policy"):
            raise ConfigurationError(
                f"{type(pl_module).__name__} has no `policy`, to whose weights RolloutGeneration brings the engine"
            )
        truncated = self.sampling["train"].top_p < 1 or self.sampling["train"].top_k > 0
        if truncated and getattr(pl_module, "old_logprobs", None) == "sampling":
            raise ConfigurationError(
                "training rollouts with top_p or top_k are not drawn from the distribution that is trained, "
                "and their ratios are biased; set top_p=1 and top_k=0, or the module's old_logprobs=policy"
            )
        if zero_stage(trainer.strategy) == 3 and getattr(self.engine, "policy", None) is pl_module.policy:
            raise ConfigurationError(
                "the engine samples from the policy's own weights, which ZeRO-3 takes apart; set rollout=vllm, or "
                "rollout.engine.own_weights=true for an engine that keeps a whole copy"
            )
        if stage == "fit":
            self.run_ahead.begin_fit(trainer)
        self._weights.forget()
        if self._runner is None:
            self._runner = asyncio.Runner()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the rollouts, then close the engine's connections, if it has some, and the event loop."""
        self.run_ahead.stop()
        if self._runner is not None:
            if isinstance(self.engine, Closable):
                self._runner.run(self.engine.aclose())
            self._runner.close()
            self._runner = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same: nothing else is called after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the rollouts before their tools are closed."""
        self.run_ahead.stop()

    def state_dict(self) -> dict[str, Any]:
        """Which tasks were handed out to rollouts that run ahead, on all ranks; empty where none do."""
        return self.run_ahead.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the tasks that were handed out and not trained."""
        self.run_ahead.load(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the engine's clock."""
        self._clock.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Fill the batch: roll out its tasks, or take groups that rollouts ahead of it have made."""
        started = time.perf_counter()
        if self.run_ahead.max_staleness:
            _log(pl_module, self.run_ahead.fill(trainer, pl_module, batch))
            _check_groups(batch)
        else:
            self._fill(pl_module, batch, self.group_size, trainer.global_step * self.group_size)
            _log(pl_module, {"time/rollout_s": time.perf_counter() - started})
        _log(pl_module, {"time/rollout_wait_s": time.perf_counter() - started, **_lost_and_tried_again(batch.groups)})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the engine did since the last step."""
        _log(pl_module, self._clock.figures())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave validation out of the engine's figures."""
        self._clock.start()

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Roll out the held-out tasks, once each."""
        self._fill(pl_module, batch, 1, 0)

    def _fill(self, pl_module: Any, batch: RolloutBatch, size: int, first_rollout: int) -> None:
        if batch.split not in self.sampling:
            raise ConfigurationError(f"no sampling settings for split {batch.split!r}; known: {sorted(self.sampling)}")
        if self._runner is None:
            raise ConfigurationError("RolloutGeneration has no event loop: setup() comes before the first batch")
        work = self._roll(batch, size, first_rollout)
        if self.run_ahead.running:
            batch.groups[:] = self.run_ahead.run_beside(pl_module, work)
        else:
            self._weights.bring_to(pl_module, pl_module.global_step)
            batch.groups[:] = self._runner.run(work)
        _check_groups(batch)

    async def _roll(self, batch: RolloutBatch, size: int, first_rollout: int) -> list[TrajectoryGroup]:
        ids = [task.id for task in batch.tasks]
        if len(set(ids)) < len(ids):
            twice = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
            raise DataError(f"the batch holds tasks twice, whose rollouts would be equal: {', '.join(twice[:5])}")
        sampling = self.sampling[batch.split]
        return await asyncio.gather(
            *(self.loop.run_group(task, size, sampling, first_rollout=first_rollout) for task in batch.tasks)
        )


class EngineClock:
    """Figures of an engine over a stretch of time; none of one that keeps no statistics."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._since_s, self._before = time.perf_counter(), self._stats()

    def figures(self) -> dict[str, float]:
        """Share of the time without a batch on the engine, and tokens sampled a second, since the last call."""
        since_s, before = self._since_s, self._before
        self.start()
        now, seconds = self._before, self._since_s - since_s
        if before is None or now is None or seconds <= 0:
            return {}
        return {
            "time/engine_idle_share": max(0.0, 1 - (now.busy_s - before.busy_s) / seconds),
            "time/sampled_tokens_per_s": (now.sampled_tokens - before.sampled_tokens) / seconds,
        }

    def _stats(self) -> EngineStats | None:
        stats = getattr(self._engine, "stats", None)
        return stats() if stats is not None else None


def _log(pl_module: L.LightningModule, figures: Mapping[str, float]) -> None:
    pl_module.log_dict(dict(figures), on_step=True, on_epoch=False, batch_size=1)


def _lost_and_tried_again(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    return {
        "rollout/abandoned": float(sum(group.n_abandoned for group in groups)),
        "rollout/retried": float(sum(group.n_retried for group in groups)),
    }


def _check_groups(batch: RolloutBatch) -> None:
    """Refuse to take an engine that fails, or a prompt without room, for a policy that does badly."""
    if not any(group.trajectories for group in batch.groups):
        raise RolloutLost(f"the engine lost every rollout of {len(batch.tasks)} tasks; its errors stand above")
    check_room(batch.groups)
