"""The measured run of this package: its ordinary components, put together as the README does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
from peers.measure import Recorder, Settings, digest
from peers.search_task import SYSTEM_PROMPT, TURNS, ZOOM_TEXT, Tools, make_tasks, make_towns, zoomed_picture
from torch.utils.data import DataLoader

from opensearch_lightning.callbacks import FatalStepMasking, RolloutGeneration, ToolExecution
from opensearch_lightning.models import load_policy, load_processor
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.rollout import TransformersEngine
from opensearch_lightning.tools import ImageBook, LocalTool, Tool, ToolExecutor, ToolOutput
from opensearch_lightning.types import RewardParts, RolloutBatch, Task, Trajectory

ROLLOUT_TOKENS = 855
"""Of a rollout on either side, on average: a pass holds as many tokens as the peer's micro-batch does."""


@dataclass(frozen=True)
class CoroutineTool:
    """A tool made of a coroutine function."""

    name: str
    schema: Mapping[str, Any]
    function: Any

    @property
    def backend(self) -> str:
        """The tool's own."""
        return self.name

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Call it."""
        return _output(await self.function(**arguments))


def _tool(function: Any, schema: Mapping[str, Any], limit: int, coroutines: bool) -> Tool:
    name = function.__name__
    if coroutines:
        return CoroutineTool(name, schema, function)
    return LocalTool(
        name=name,
        backend=name,
        schema=schema,
        function=lambda arguments, images: _output(function(**arguments)),
        backend_limit=limit,
    )


def _output(returned: Any) -> ToolOutput:
    return (
        ToolOutput(text=returned) if isinstance(returned, str) else ToolOutput(text=ZOOM_TEXT, image=zoomed_picture())
    )


class _Reward:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        total = self._settings.reward(trajectory.rollout)
        return RewardParts(total=total, format=1.0, accuracy=total, query=0.0)


class _TimedGRPO(FatalAwareGRPO):
    def __init__(self, policy: Any, recorder: Recorder, **options: Any) -> None:
        super().__init__(policy, **options)
        self._recorder = recorder

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        with self._recorder.timed("update_s"):
            super().training_step(batch, batch_idx)

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        with self._recorder.timed("backward_s"):
            super().manual_backward(loss, *args, **kwargs)


class _ToolTimes(L.Callback):
    """Sets how long the tools take; stands before the rollouts."""

    def __init__(self, tools: Tools, times: list[float]) -> None:
        self._tools, self._times = tools, times

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: RolloutBatch, batch_idx: int) -> None:
        self._tools.seconds = self._times[batch_idx]


class _Record(L.Callback):
    """Keeps the figures of each step; stands behind all others."""

    def __init__(self, recorder: Recorder, tools: Tools) -> None:
        self._recorder, self._tools = recorder, tools

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._recorder.start()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        runs = [run for group in batch.groups for run in group.trajectories]
        prompts = [run.token_ids[: int((run.step_ids >= 0).int().argmax())] for run in runs]
        if batch_idx == 0:
            self._recorder.figures["prompts"] = digest([prompt.tolist() for prompt in prompts])
        prompt_tokens = sum(map(len, prompts))
        self._recorder.end_step(
            tool_s=self._tools.seconds,
            generation_s=float(trainer.callback_metrics["time/rollout_s"]),
            rollouts=len(runs),
            turns=sum(len(run.steps) for run in runs) / len(runs),
            whole=sum(len(run.steps) == TURNS for run in runs) / len(runs),
            sampled_tokens=sum(int((run.step_ids >= 0).sum()) for run in runs),
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(run.token_ids) for run in runs) - prompt_tokens,
        )


def run(settings: Settings) -> dict[str, Any]:
    """Train for the steps of ``settings`` and tell what was measured."""
    recorder = Recorder()
    towns = make_towns(settings.task_count())
    tools, tasks = Tools(towns, coroutines=settings.coroutines), make_tasks(towns)
    rollouts = settings.prompts * settings.group
    executor = ToolExecutor(
        [
            _tool(function, schema, rollouts, settings.coroutines)
            for function, schema in zip(tools.functions(), tools.schemas(), strict=True)
        ],
        max_concurrency=rollouts,
    )
    policy, processor = load_policy(settings.policy), load_processor(settings.policy)
    module = _TimedGRPO(
        policy,
        recorder,
        # every rollout is trained, as the peer does
        clamp_fatal=False,
        lr=settings.lr,
        max_tokens_per_micro_batch=settings.micro_batch * ROLLOUT_TOKENS,
    )
    generation = RolloutGeneration(
        TransformersEngine(policy, processor, max_sequences=rollouts),
        executor,
        _Reward(settings),
        group_size=settings.group,
        system_prompt=SYSTEM_PROMPT,
        max_turns=TURNS,
        max_turn_tokens=settings.completion_tokens,
        max_response_tokens=settings.completion_tokens,
        temperature=1.0,
        seed=settings.seed,
    )
    batches = [
        RolloutBatch(tasks=tasks[start : start + settings.prompts]) for start in range(0, len(tasks), settings.prompts)
    ]
    trainer = L.Trainer(
        max_steps=len(batches),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            _ToolTimes(tools, settings.tool_times()),
            ToolExecution(executor),
            generation,
            FatalStepMasking(mode="none"),
            _Record(recorder, tools),
        ],
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return recorder.report()
