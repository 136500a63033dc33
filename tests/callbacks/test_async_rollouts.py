"""Rollouts that run ahead of the training: on a scripted engine, whose sessions take as long as a test says."""

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from opensearch_lightning.callbacks import RolloutGeneration
from opensearch_lightning.data import SearchVLRLDataModule
from opensearch_lightning.errors import ConfigurationError, RolloutLost
from opensearch_lightning.models import load_policy, load_processor
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.rollout import AgentLoop, SamplingParams, SessionKey, TransformersEngine
from opensearch_lightning.tools import ToolExecutor
from opensearch_lightning.types import RewardParts, RolloutBatch, Task, Trajectory
from tests.data.rows import rl_shards, task
from tests.data.trainers import Broken, checkpoints, trainer
from tests.models.tiny import tiny_checkpoint, tiny_policy, tiny_processor, tiny_renderer
from tests.scripted_engine import ScriptedEngine
from tests.tools.fakes import FakeTool
from tests.toy_reward import EvenTokens

ANSWER = "<think>so</think>\n<response>Lyon</response>"
STEPS, PROMPTS, GROUP = 8, 3, 2

Wait = Callable[[SessionKey], Any]


class LiveEngine(ScriptedEngine):
    """Takes new weights at any time; each session first awaits what ``wait`` returns, and may raise."""

    live_updates = True

    def __init__(self, wait: Wait) -> None:
        super().__init__(tiny_renderer(), [ANSWER])
        self.wait = wait
        self.opened: list[SessionKey] = []
        self.n_open = 0

    @asynccontextmanager
    async def session(self, key: SessionKey) -> AsyncIterator[Any]:
        self.opened.append(key)
        self.n_open += 1
        try:
            async with super().session(key) as session:
                await self.wait(key)
                yield session
        finally:
            self.n_open -= 1


class Keeper(L.LightningModule):
    """Keeps which tasks it was trained on, and how old their trajectories were."""

    def __init__(self, *, break_at: int | None = None, at_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = nn.Linear(1, 1)
        self.trained: list[list[str]] = []
        self.rollouts: list[tuple[str, int]] = []
        self.ages: list[int] = []
        self.break_at, self.at_step = break_at, at_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        if batch_idx == self.break_at:
            raise Broken
        assert [group.task.id for group in batch.groups] == [task.id for task in batch.tasks]
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.at_step(batch_idx)
        self.trained.append([task.id for task in batch.tasks])
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        self.rollouts += [(row.task_id, row.rollout) for row in rows]
        assert batch.number is not None
        self.ages += [batch.number - row.weight_version for row in rows]

    def validation_step(self, batch: RolloutBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl_shards(tmp_path_factory.mktemp("rl") / "s", 30)


class NoReward:
    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        return RewardParts(total=1.0, format=1.0, accuracy=1.0, query=1.0)


def generation(engine: Any, **options: Any) -> RolloutGeneration:
    executor = ToolExecutor([FakeTool()])
    return RolloutGeneration(
        engine, executor, NoReward(), **{"group_size": GROUP, "max_staleness": 1, "render_tools": False, **options}
    )


def fit(engine: Any, shards: Path, module: Keeper, *callbacks: Any, ckpt: Path | None = None, **options: Any) -> Keeper:
    settings = {key: options.pop(key) for key in ("val_check_interval",) if key in options}
    steps = options.pop("steps", STEPS)
    run = trainer(steps, generation(engine, **options), *callbacks, **settings)
    val = {"val_shards": shards, "val_tasks": 2} if settings else {}
    data = SearchVLRLDataModule(shards, prompts_per_step=PROMPTS, **val)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transfer_batch.*|.*does not have many workers.*|.*resumable.*")
        run.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=False)
    return module


def in_order(shards: Path, steps: int) -> list[list[str]]:
    """The tasks of the first steps in the order of the data."""
    data = SearchVLRLDataModule(shards, prompts_per_step=PROMPTS)
    return [[task.id for task in data.train_batch(number).tasks] for number in range(steps)]


def tasks_of(batches: list[list[str]]) -> list[str]:
    return sorted(task_id for batch in batches for task_id in batch)


def uneven(key: SessionKey) -> Any:
    """Between 0 and 30 ms, by the rollout."""
    return asyncio.sleep(0.03 * (hash((key.task_id[-2:], key.rollout)) % 97 / 97))


def no_rollout_thread() -> bool:
    return not any(thread.name == "rollouts" for thread in threading.enumerate())


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_every_task_is_trained_once_and_no_trajectory_is_too_old(shards: Path, max_staleness: int) -> None:
    engine = LiveEngine(uneven)
    module = fit(engine, shards, Keeper(), max_staleness=max_staleness)
    assert tasks_of(module.trained) == tasks_of(in_order(shards, STEPS))
    assert {len(batch) for batch in module.trained} == {PROMPTS}
    assert 0 < max(module.ages) <= max_staleness
    assert len(set(module.rollouts)) == STEPS * PROMPTS * GROUP
    # nothing is rolled out that no step could train
    assert len(engine.opened) == STEPS * PROMPTS * GROUP
    assert engine.n_open == 0
    assert no_rollout_thread()


def test_a_slow_rollout_holds_up_no_step_that_can_do_without(shards: Path) -> None:
    slow = in_order(shards, 1)[0][0]
    released = threading.Event()

    async def wait(key: SessionKey) -> None:
        while key.task_id == slow and not released.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0.002)

    # with max_staleness 2 the groups begun at version 0 may be trained up to step 2
    module = fit(LiveEngine(wait), shards, Keeper(at_step=lambda step: step == 1 and released.set()), max_staleness=2)
    assert slow not in tasks_of(module.trained[:2])
    assert slow in module.trained[2]
    assert tasks_of(module.trained) == tasks_of(in_order(shards, STEPS))


def test_what_would_be_too_old_is_dropped_where_that_is_wished(shards: Path) -> None:
    slow = in_order(shards, 1)[0][0]

    async def wait(key: SessionKey) -> None:
        await asyncio.sleep(3600 if key.task_id == slow else 0)

    engine = LiveEngine(wait)
    module = fit(engine, shards, Keeper(), on_stale="drop")
    assert slow not in tasks_of(module.trained)
    assert {len(batch) for batch in module.trained} == {PROMPTS}
    assert len(set(tasks_of(module.trained))) == STEPS * PROMPTS
    assert engine.n_open == 0


def test_an_error_among_the_rollouts_comes_out_of_the_fit(shards: Path) -> None:
    broken = in_order(shards, 3)[2][1]

    async def wait(key: SessionKey) -> None:
        if key.task_id == broken:
            raise ZeroDivisionError("broken tool")

    engine = LiveEngine(wait)
    with pytest.raises(ZeroDivisionError, match="broken tool"):
        fit(engine, shards, Keeper())
    assert engine.n_open == 0
    assert no_rollout_thread()


@pytest.mark.filterwarnings(
    "error::ResourceWarning", "error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning"
)
def test_rollouts_stop_when_training_breaks_off(shards: Path) -> None:
    first = {task_id for batch in in_order(shards, 2) for task_id in batch}

    async def wait(key: SessionKey) -> None:
        await asyncio.sleep(0 if key.task_id in first else 3600)

    engine = LiveEngine(wait)
    with pytest.raises(Broken):
        fit(engine, shards, Keeper(break_at=1))
    assert any(key.task_id not in first for key in engine.opened)
    assert engine.n_open == 0
    assert no_rollout_thread()


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_run_trains_each_task_once(shards: Path, tmp_path: Path, step: int) -> None:
    slow, released = in_order(shards, 1)[0][0], threading.Event()

    async def wait(key: SessionKey) -> None:
        # the first batch's own task comes late, so that what is trained is out of order
        while key.task_id == slow and not released.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0.002)

    options = {"max_staleness": 2}
    module = Keeper(at_step=lambda step: released.set())
    before = fit(LiveEngine(wait), shards, module, checkpoints(tmp_path, every_n_train_steps=1), **options)
    saved = tmp_path / f"{step}.ckpt"
    resumed = fit(LiveEngine(wait), shards, Keeper(), ckpt=saved, **options)
    assert len(resumed.trained) == STEPS - step
    assert tasks_of(before.trained[:step] + resumed.trained) == tasks_of(in_order(shards, STEPS))
    assert before.trained != in_order(shards, STEPS)


def test_a_checkpoint_of_the_middle_does_not_go_on_in_step(shards: Path, tmp_path: Path) -> None:
    fit(LiveEngine(uneven), shards, Keeper(), checkpoints(tmp_path, every_n_train_steps=1))
    with pytest.raises(ConfigurationError, match="max_staleness=0 would leave out"):
        fit(LiveEngine(uneven), shards, Keeper(), ckpt=tmp_path / "3.ckpt", max_staleness=0)


def test_validation_sees_the_weights_of_its_step(shards: Path) -> None:
    engine = LiveEngine(uneven)
    seen: list[tuple[int, int]] = []

    class Look(L.Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            assert [len(group.trajectories) for group in batch.groups] == [1] * len(batch.tasks)
            seen.append((trainer.global_step, engine.weight_version))

    module = fit(engine, shards, Keeper(), Look(), val_check_interval=3)
    assert seen == [(3, 3), (3, 3), (6, 6), (6, 6)]
    assert tasks_of(module.trained) == tasks_of(in_order(shards, STEPS))


def test_what_cannot_run_ahead_is_refused(shards: Path) -> None:
    engine = TransformersEngine(tiny_policy(), tiny_processor(), own_weights=True, reproducible=True)
    with pytest.raises(ConfigurationError, match="reproducible=false"):
        fit(engine, shards, Keeper())
    run = trainer(1, generation(LiveEngine(uneven)))
    with pytest.raises(ConfigurationError, match="train_batch"):
        run.fit(Keeper(), train_dataloaders=[RolloutBatch(tasks=[task(1)])])
    for bad in ({"max_staleness": -1}, {"on_stale": "x"}, {"max_parallel_rollouts": 0}, {"incomplete_groups": "x"}):
        with pytest.raises(ConfigurationError, match="-1|x|0"):
            generation(LiveEngine(uneven), **bad)


@pytest.mark.parametrize(
    ("policy", "kept", "lost", "retried"),
    [("retry", [0, 1, 2], 0, 1), ("drop_rollout", [0, 2], 1, 0), ("drop_group", [], 3, 0)],
)
def test_a_lost_rollout_is_retried_or_dropped(policy: Any, kept: list[int], lost: int, retried: int) -> None:
    failures = iter([True])

    async def wait(key: SessionKey) -> None:
        if key.rollout == 1 and next(failures, False):
            raise RolloutLost("the engine died")

    loop = AgentLoop(
        LiveEngine(wait), ToolExecutor([FakeTool()]), system_prompt="", render_tools=False, incomplete_groups=policy
    )
    group = asyncio.run(loop.run_group(task(1), 3, SamplingParams()))
    assert [trajectory.rollout for trajectory in group.trajectories] == kept
    assert (group.n_lost, group.n_retried, group.n_abandoned) == (lost, retried, 0)


def test_a_rollout_that_takes_too_long_is_abandoned() -> None:
    async def wait(key: SessionKey) -> None:
        await asyncio.sleep(3600 if key.rollout == 1 else 0)

    engine = LiveEngine(wait)
    loop = AgentLoop(engine, ToolExecutor([FakeTool()]), system_prompt="", render_tools=False, rollout_timeout_s=2.0)
    group = asyncio.run(loop.run_group(task(1), 3, SamplingParams()))
    assert [trajectory.rollout for trajectory in group.trajectories] == [0, 2]
    assert (group.n_lost, group.n_retried, group.n_abandoned) == (1, 0, 1)
    assert engine.n_open == 0


class ByHand(L.Callback):
    """The synchronous path in four lines: new weights, then all groups of the batch."""

    def __init__(self, engine: Any, loop: AgentLoop, sampling: SamplingParams) -> None:
        self.engine, self.loop, self.sampling = engine, loop, sampling

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: RolloutBatch, batch_idx: int) -> None:
        self.engine.update_weights(pl_module.policy.named_parameters(), trainer.global_step)

        async def roll() -> list[Any]:
            first = GROUP * trainer.global_step
            return await asyncio.gather(
                *(self.loop.run_group(task, GROUP, self.sampling, first_rollout=first) for task in batch.tasks)
            )

        batch.groups[:] = asyncio.run(roll())


def test_without_staleness_nothing_changes_to_the_bit(shards: Path) -> None:
    def train(by_hand: bool) -> tuple[Any, list[float]]:
        policy = load_policy(tiny_checkpoint())
        engine = TransformersEngine(policy, load_processor(tiny_checkpoint()), reproducible=True, max_length=512)
        callback: Any = RolloutGeneration(
            engine,
            ToolExecutor([FakeTool()]),
            EvenTokens(),
            group_size=GROUP,
            max_staleness=0,
            max_turns=2,
            max_turn_tokens=6,
            render_tools=False,
        )
        used = ByHand(engine, callback.loop, callback.sampling["train"]) if by_hand else callback
        losses: list[float] = []

        class Keep(L.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                losses.append(float(trainer.callback_metrics["train/loss"]))

        module = FatalAwareGRPO(policy, lr=1e-2)
        trainer(3, used, Keep()).fit(module, datamodule=SearchVLRLDataModule(shards, prompts_per_step=2))
        return policy, losses

    (one, one_losses), (other, other_losses) = train(True), train(False)
    start = load_policy(tiny_checkpoint())
    assert one_losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), start.parameters(), strict=True))
