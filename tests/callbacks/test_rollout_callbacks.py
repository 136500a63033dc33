"""The composition of docs/architecture.md on a tiny world, and each callback's part in it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.models import load_policy, load_processor
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.rewards import CompositeReward, ExactMatchJudge, LexicalQueryJudge
from opensearch_lightning.rollout import TransformersEngine
from opensearch_lightning.strategies import ZeroStrategy
from opensearch_lightning.tools import FaultInjector, ToolExecutor, offline_tools
from opensearch_lightning.types import NON_FATAL, ErrorKind, RolloutBatch, StopReason, Task, TrajectoryGroup
from tests.modules.rollouts import trajectory


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

    def __init__(self, record: Any = None, *, clamp_fatal: bool = True) -> None:
        self.figures: dict[str, float] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.last_advantages, self.clamp_fatal = record, clamp_fatal

    def log(self, name: str, value: float, **options: Any) -> None:
        self.figures[name] = float(value)
        self.options[name] = options

    def log_dict(self, figures: dict[str, float], **_: Any) -> None:
        self.figures.update(figures)


def noted_clamp(*, clamp_fatal: bool) -> Noted:
    """What is logged of three voters, of which the last is fatal, and one row without a reward."""
    rows = [
        trajectory("a", 0, 1.0),
        trajectory("a", 1, 0.0),
        trajectory("a", 2, 0.0, fatal_step=1),
        trajectory("a", 3, None),
    ]
    module = FatalAwareGRPO(torch.nn.Linear(1, 1), advantage="rloo", clamp_fatal=clamp_fatal)
    noted = Noted(module.compute_advantages(batch_of(rows)), clamp_fatal=clamp_fatal)
    ClampedAdvantageLogging().on_train_batch_end(L.Trainer(**QUIET), noted, None, None, 0)
    return noted


def test_the_clamp_is_logged_as_worked_by_hand() -> None:
    noted = noted_clamp(clamp_fatal=True)
    # advantages 1, -1/2, -1/2; one of three voters is clamped, which adds (1/2)/3
    assert noted.figures["train/clamped_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/clamp_bias"] == pytest.approx(0.5 / 3)
    assert noted.figures["train/advantage_fatal"] == pytest.approx(-0.5)
    assert noted.figures["train/advantage_non_fatal"] == pytest.approx(0.25)
    assert noted.figures["train/equal_reward_fraction"] == 0
    assert noted.figures["train/fatal_negative_fraction"] == 1


def test_without_a_clamp_its_figures_are_zero() -> None:
    figures = noted_clamp(clamp_fatal=False).figures
    assert figures["train/clamped_fraction"] == 0
    assert figures["train/clamp_bias"] == 0
    assert figures["train/advantage_fatal"] == pytest.approx(-0.5)


def test_logging_advantages_of_another_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="FatalAwareGRPO"):
        ClampedAdvantageLogging().on_train_batch_end(None, Noted(), None, None, 0)  # type: ignore[arg-type]


def test_curves_are_means_over_the_batch() -> None:
    noted = Noted()
    rows = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, fatal_step=1), trajectory("a", 2, None)]
    ToolUseCurves().on_train_batch_start(L.Trainer(**QUIET), noted, batch_of(rows), 0)  # type: ignore[arg-type]
    assert noted.figures["train/accuracy"] == 0.5
    assert noted.figures["train/invalid_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/fatal_fraction"] == pytest.approx(1 / 3)
    assert noted.figures["train/stop/response"] == 1
    assert noted.figures["train/lost_rollouts"] == 0


def rewards_among(figures: dict[str, float]) -> set[str]:
    return {name for name in figures if "reward" in name or "accuracy" in name}


def test_a_batch_nobody_scored_has_no_reward() -> None:
    noted = Noted()
    rows = [trajectory("a", 0, None), trajectory("a", 1, None, fatal_step=1)]
    ToolUseCurves().on_train_batch_start(L.Trainer(**QUIET), noted, batch_of(rows), 0)  # type: ignore[arg-type]
    assert rewards_among(noted.figures) == set()
    assert noted.figures["train/invalid_fraction"] == 1
    assert noted.figures["train/fatal_fraction"] == 0.5


def test_a_batch_of_lost_rollouts_logs_only_how_many() -> None:
    noted = Noted()
    batch = batch_of([])
    batch.groups[0] = replace(batch.groups[0], n_lost=3)
    ToolUseCurves().on_train_batch_start(L.Trainer(**QUIET), noted, batch, 0)  # type: ignore[arg-type]
    assert noted.figures == {"train/lost_rollouts": 3}
    assert noted.options["train/lost_rollouts"]["batch_size"] > 0


def validated(*batches: RolloutBatch, others_scored: bool = False) -> Noted:
    """What is logged of a validation; ``others_scored``: another rank has figures to log."""
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision or others_scored)  # noqa: A006
    trainer, noted, curves = SimpleNamespace(strategy=strategy), Noted(), ToolUseCurves()
    for number, batch in enumerate(batches):
        curves.on_validation_batch_end(trainer, noted, None, replace(batch, split="val_greedy"), number)  # type: ignore[arg-type]
    curves.on_validation_epoch_end(trainer, noted)  # type: ignore[arg-type]
    return noted


def test_validation_is_the_mean_over_batches_and_ranks() -> None:
    lost = batch_of([trajectory("b", 0, 1.0), trajectory("b", 1, 0.0), trajectory("b", 2, None)])
    lost.groups[0] = replace(lost.groups[0], n_lost=2)
    noted = validated(batch_of([trajectory("a", 0, 1.0)]), lost)
    assert noted.figures["val_greedy/accuracy"] == noted.figures["val_greedy/reward_accuracy"] == pytest.approx(2 / 3)
    assert noted.figures["val_greedy/invalid_fraction"] == 0.25
    assert noted.figures["val_greedy/lost_rollouts"] == 2
    assert noted.options["val_greedy/lost_rollouts"]["reduce_fx"] == "sum"
    assert all(options["sync_dist"] for options in noted.options.values())
    # each figure weighs by the trajectories behind it
    assert noted.options["val_greedy/accuracy"]["batch_size"] == 3
    assert noted.options["val_greedy/turns"]["batch_size"] == 4
    # whole numbers would be rounded when they are averaged over ranks
    assert isinstance(noted.options["val_greedy/accuracy"]["batch_size"], float)


def test_a_rank_without_scores_logs_what_the_others_log() -> None:
    unscored = batch_of([trajectory("a", 0, None)])
    assert rewards_among(validated(unscored).figures) == set()
    noted = validated(unscored, others_scored=True)
    assert "val_greedy/accuracy" in noted.figures
    assert noted.options["val_greedy/accuracy"]["batch_size"] == 0


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


def test_prompts_that_fill_the_context_are_no_training(tiny: dict[str, Path], tiny_world: Any) -> None:
    policy = load_policy(tiny["model"])
    engine = TransformersEngine(policy, load_processor(tiny["model"]), max_length=64)
    generation = RolloutGeneration(engine, ToolExecutor(offline_tools(tiny_world)), None, group_size=2)  # type: ignore[arg-type]
    module = FatalAwareGRPO(policy)
    trainer = L.Trainer(max_steps=1, callbacks=[generation], **QUIET)
    with pytest.raises(ConfigurationError, match="max_length"):
        trainer.fit(module, datamodule=SearchVLRLDataModule(tiny["rl"], prompts_per_step=2))


def test_an_engine_on_weights_that_zero_3_takes_apart_is_refused(tiny: dict[str, Path], tiny_world: Any) -> None:
    policy, processor = load_policy(tiny["model"]), load_processor(tiny["model"])
    executor = ToolExecutor(offline_tools(tiny_world))
    sharded: Any = SimpleNamespace(strategy=ZeroStrategy(stage=3), global_rank=0, world_size=1)
    shared = RolloutGeneration(TransformersEngine(policy, processor), executor, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="own_weights=true"):
        shared.setup(sharded, FatalAwareGRPO(policy), "fit")
    apart = RolloutGeneration(TransformersEngine(policy, processor, own_weights=True), executor, None)  # type: ignore[arg-type]
    apart.setup(sharded, FatalAwareGRPO(policy), "fit")
    apart.teardown(sharded, FatalAwareGRPO(policy), "fit")


def test_training_on_truncated_sampling_is_refused(tiny: dict[str, Path], tiny_world: Any) -> None:
    policy = load_policy(tiny["model"])
    engine = TransformersEngine(policy, load_processor(tiny["model"]))
    generation = RolloutGeneration(engine, ToolExecutor(offline_tools(tiny_world)), None, top_p=0.9)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="top_p"):
        generation.setup(L.Trainer(**QUIET), FatalAwareGRPO(policy), "fit")


@pytest.mark.parametrize(
    ("bad", "named"), [({"temperature": 0.0}, "temperature"), ({"counted_errors": "timeout"}, "list")]
)
def test_settings_that_teach_nothing_are_refused(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        RolloutGeneration(None, None, None, **bad)  # type: ignore[arg-type]


def test_a_task_twice_in_a_batch_is_refused(tiny: dict[str, Path], tiny_world: Any) -> None:
    policy = load_policy(tiny["model"])
    engine = TransformersEngine(policy, load_processor(tiny["model"]))
    generation = RolloutGeneration(engine, ToolExecutor(offline_tools(tiny_world)), None)  # type: ignore[arg-type]
    generation.setup(L.Trainer(**QUIET), FatalAwareGRPO(policy), "fit")
    task = tiny_world.tasks("rl")[0]
    with pytest.raises(DataError, match=task.id):
        generation._fill(FatalAwareGRPO(policy), RolloutBatch(tasks=[task, task]), 2, 0)
    generation.teardown(None, None, "fit")  # type: ignore[arg-type]


def test_rollouts_need_a_module_with_a_policy(tiny: dict[str, Path], tiny_world: Any) -> None:
    engine = TransformersEngine(load_policy(tiny["model"]), load_processor(tiny["model"]))
    callback = RolloutGeneration(engine, ToolExecutor(offline_tools(tiny_world)), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="policy"):
        callback.setup(None, L.LightningModule(), "fit")  # type: ignore[arg-type]
