"""Fills each batch with trajectories of the current policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, Literal

import lightning as L

from opensearch_lightning.errors import ConfigurationError, DataError, RolloutLost
from opensearch_lightning.rollout import AgentLoop, Reward, RolloutEngine, SamplingParams, check_room
from opensearch_lightning.tools import ToolExecutor
from opensearch_lightning.types import ErrorKind, RolloutBatch, TrajectoryGroup

DEFAULT_SYSTEM_PROMPT = (
    "Answer the question about the picture. Think in <think></think>, then either call one tool in "
    "<tool_call></tool_call> or give the short answer in <response></response>."
)


class RolloutGeneration(L.Callback):
    """Before each training step and validation batch: bring the engine to the policy's weights, run the agent, score.

    ``batch.groups`` is filled in place. Training rollouts of a task that comes again are numbered on, so that noise and
    injected faults are new; validation always sees the same ones, so that its curve compares like with like.

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
    ) -> None:
        if group_size < 1:
            raise ConfigurationError(f"group_size is {group_size}; set at least 1 (8 in the recipe)")
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
        )
        limits = {"max_turn_tokens": max_turn_tokens, "seed": seed}
        self.sampling = {
            "train": SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, **limits),
            "val_sampled": SamplingParams(temperature=temperature, top_p=val_top_p, **limits),
            "val_greedy": SamplingParams(temperature=0.0, **limits),
        }
        self._runner: asyncio.Runner | None = None

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
        if self._runner is None:
            self._runner = asyncio.Runner()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Roll out the training tasks."""
        seconds = self._fill(pl_module, batch, self.group_size, trainer.global_step * self.group_size)
        pl_module.log("time/rollout_s", seconds, on_step=True, on_epoch=False, batch_size=1)

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

    def _fill(self, pl_module: Any, batch: RolloutBatch, size: int, first_rollout: int) -> float:
        if batch.split not in self.sampling:
            raise ConfigurationError(f"no sampling settings for split {batch.split!r}; known: {sorted(self.sampling)}")
        if self._runner is None:
            raise ConfigurationError("RolloutGeneration has no event loop: setup() comes before the first batch")
        started = time.perf_counter()
        self.engine.update_weights(pl_module.policy.named_parameters(), pl_module.global_step)
        batch.groups[:] = self._runner.run(self._roll(batch, size, first_rollout))
        if not any(group.trajectories for group in batch.groups):
            raise RolloutLost(f"the engine lost every rollout of {len(batch.tasks)} tasks; its errors stand above")
        check_room(batch.groups)
        return time.perf_counter() - started

    async def _roll(self, batch: RolloutBatch, size: int, first_rollout: int) -> list[TrajectoryGroup]:
        ids = [task.id for task in batch.tasks]
        if len(set(ids)) < len(ids):
            twice = sorted({task_id for task_id in ids if ids.count(task_id) > 1})
            raise DataError(f"the batch holds tasks twice, whose rollouts would be equal: {', '.join(twice[:5])}")
        sampling = self.sampling[batch.split]
        return await asyncio.gather(
            *(self.loop.run_group(task, size, sampling, first_rollout=first_rollout) for task in batch.tasks)
        )
