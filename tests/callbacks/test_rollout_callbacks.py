"""The composition of docs/architecture.md on a tiny world, and each callback's part in it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from opensearch_lightning.callbacks import (
    ClampedAdvantageLogging,
    FatalStepMasking,
    RolloutGeneration,
    ToolExecution,
    ToolUseCurves,
)
from opensearch_lightning.data import SearchVLRLDataModule
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import load_policy, load_processor
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.rewards import CompositeReward, ExactMatchJudge, LexicalQueryJudge
from opensearch_lightning.rollout import TransformersEngine
from opensearch_lightning.tools import FaultInjector, ToolExecutor, offline_tools
from opensearch_lightning.types import NON_FATAL, ErrorKind, RolloutBatch, StopReason, Task, TrajectoryGroup
from tests.modules.test_grpo import trajectory


def test_the_composition_of_the_documentation_trains(tiny: dict[str, Path], tiny_world: Any) -> None:
    policy, processor = load_policy(tiny["model"]), load_processor(tiny["model"])
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    engine = TransformersEngine(policy, processor)
    executor = ToolExecutor(offline_tools(tiny_world), timeout_s=10, max_concurrency=64)
    reward = CompositeReward(accuracy=ExactMatchJudge(), query=LexicalQueryJudge(), alpha=0.8)
    logged = Collect()
    trainer = L.Trainer(
        max_steps=2,
        callbacks=[
            ToolExecution(executor),
            RolloutGeneration(
                engine, executor, reward, group_size=3, fatal_k=3, fatal_onset="first", max_turn_tokens=12, max_turns=4
            ),
            FatalStepMasking(mode="fatal"),
            ClampedAdvantageLogging(),
            ToolUseCurves(),
            logged,
        ],
        **QUIET,
    )
    module = FatalAwareGRPO(policy, advantage="rloo", clamp_fatal=True, clip=(0.2, 0.28))
    trainer.fit(module, datamodule=SearchVLRLDataModule(tiny["rl"], prompts_per_step=2))
    assert trainer.global_step == 2
    # a random policy answers nothing: rewards are equal, so nothing may move, and every figure says so
    figures = logged.rows[-1]
    assert figures["train/equal_reward_fraction"] == 1
    assert figures["train/accuracy"] == 0
    assert figures["train/fatal_fraction"] == 1
    assert figures["train/turns"] > 0
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    assert not any(name.startswith("val") for name in figures)
    assert len(logged.batches[-1].groups) == 2
    assert all(len(group.trajectories) == 3 for group in logged.batches[-1].groups)
    # a task's rollouts are numbered on, so that noise and faults differ from step to step
    numbers = [{t.rollout for group in batch.groups for t in group.trajectories} for batch in logged.batches]
    assert numbers == [{0, 1, 2}, {3, 4, 5}]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class Collect(L.Callback):
    """Keeps what a trainer logged and trained on."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.batches: list[RolloutBatch] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.batches.append(batch)


def batch_of(rows: Sequence[Any]) -> RolloutBatch:
    group = TrajectoryGroup(task=Task(id="a", question="", answer="", images=()), trajectories=tuple(rows))
    return RolloutBatch(tasks=[group.task], groups=[group])


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("none", (NON_FATAL,) * 3), ("hard", (NON_FATAL, 0, 0)), ("fatal", (NON_FATAL, 2, NON_FATAL))],
)
def test_the_mask_of_each_mode(mode: Any, kept: tuple[int, ...]) -> None:
    out_of_turns = replace(trajectory("a", 2, 0.0, is_fatal=True), stop_reason=StopReason.MAX_TURNS)
    batch = batch_of([trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, fatal_step=2), out_of_turns])
    FatalStepMasking(mode=mode).on_train_batch_start(None, None, batch, 0)  # type: ignore[arg-type]
    assert batch.groups[0].kept_steps == kept


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="soft"):
        FatalStepMasking(mode="soft")  # type: ignore[arg-type]


@pytest.mark.parametrize("callback", [FatalStepMasking(), ToolUseCurves()])
def test_a_batch_nobody_filled_names_the_missing_callback(callback: Any) -> None:
    with pytest.raises(ConfigurationError, match="RolloutGeneration before"):
        callback.on_train_batch_start(None, None, RolloutBatch(tasks=[]), 0)


class Noted:
    """Stands for a module: keeps what is logged, and advantages to look at."""

    def __init__(self, record: Any = None) -> None:
        self.figures: dict[str, float] = {}
        self.last_advantages = record

    def log(self, name: str, value: float, **_: Any) -> None:
        self.figures[name] = float(value)

    def log_dict(self, figures: dict[str, float], **_: Any) -> None:
        self.figures.update(figures)


def test_the_clamp_is_logged_as_worked_by_hand() -> None:
    rows = [
        trajectory("a", 0, 1.0),
        trajectory("a", 1, 0.0),
        trajectory("a", 2, 0.0, fatal_step=1),
        trajectory("a", 3, None),
    ]
    module = FatalAwareGRPO.__new__(FatalAwareGRPO)
    L.LightningModule.__init__(module)
    module.advantage, module.clamp_fatal = "rloo", True  # type: ignore[assignment]
    noted = Noted(module.compute_advantages(batch_of(rows)))
    ClampedAdvantageLogging().on_train_batch_end(None, noted, None, None, 0)  # type: ignore[arg-type]
    # advantages 1, -1/2, -1/2; one of three voters is clamped, which adds (1/2)/3
    assert noted.figures["train/clamped_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/clamp_bias"] == pytest.approx(0.5 / 3)
    assert noted.figures["train/advantage_fatal"] == pytest.approx(-0.5)
    assert noted.figures["train/advantage_non_fatal"] == pytest.approx(0.25)
    assert noted.figures["train/equal_reward_fraction"] == 0
    assert noted.figures["train/fatal_negative_fraction"] == 1


def test_logging_advantages_of_another_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FatalAwareGRPO"):
        ClampedAdvantageLogging().on_train_batch_end(None, Noted(), None, None, 0)  # type: ignore[arg-type]


def test_curves_are_means_over_the_batch() -> None:
    noted = Noted()
    rows = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, fatal_step=1), trajectory("a", 2, None)]
    ToolUseCurves().on_train_batch_start(None, noted, batch_of(rows), 0)  # type: ignore[arg-type]
    assert noted.figures["train/accuracy"] == 0.5
    assert noted.figures["train/invalid_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/fatal_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/stop/response"] == 1
    assert noted.figures["train/lost_rollouts"] == 0


def test_tool_figures_are_those_of_one_step(tiny_world: Any) -> None:
    import asyncio

    from opensearch_lightning.tools import CallKey, ImageBook
    from opensearch_lightning.types import Action

    executor = ToolExecutor(offline_tools(tiny_world), faults=FaultInjector(0, {ErrorKind.TIMEOUT: 1.0}))
    callback, noted = ToolExecution(executor), Noted()
    callback.on_train_batch_start(None, noted, None, 0)  # type: ignore[arg-type]
    action = Action(kind="tool_call", name="text_search", arguments={"q": "x"})

    async def call() -> None:
        await executor.execute(action, ImageBook(), CallKey(task_id="a", rollout=0, step=0))

    asyncio.run(call())
    callback.on_train_batch_end(None, noted, None, None, 0)  # type: ignore[arg-type]
    assert noted.figures["tools/text_search/calls"] == 1
    assert noted.figures["tools/text_search/errors/timeout"] == 1
    assert noted.figures["tools/crop/calls"] == 0
    callback.on_train_batch_start(None, noted, None, 1)  # type: ignore[arg-type]
    callback.on_train_batch_end(None, noted, None, None, 1)  # type: ignore[arg-type]
    assert noted.figures["tools/text_search/calls"] == 0
    callback.teardown(None, noted, "fit")  # type: ignore[arg-type]


def test_rollouts_need_a_module_with_a_policy(tiny: dict[str, Path], tiny_world: Any) -> None:
    engine = TransformersEngine(load_policy(tiny["model"]), load_processor(tiny["model"]))
    callback = RolloutGeneration(engine, ToolExecutor(offline_tools(tiny_world)), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="policy"):
        callback.setup(None, L.LightningModule(), "fit")  # type: ignore[arg-type]
