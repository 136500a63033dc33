import logging
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.data import SearchVLRLDataModule, write_rl_shards
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.types import RolloutBatch, Task, TrajectoryGroup
from tests.data.ranks import on_rank
from tests.data.rows import rl_shards, task
from tests.data.trainers import Recorder, trainer


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl_shards(tmp_path_factory.mktemp("rl") / "s", 10)


def module(shards: Any, **options: Any) -> SearchVLRLDataModule:
    return SearchVLRLDataModule(shards, **{"prompts_per_step": 4, **options})


def ids(batches: Any, number: int) -> list[list[str]]:
    return [[task.id for task in batch.tasks] for batch in islice(batches, number)]


def test_batches_hold_whole_tasks(shards: Path) -> None:
    batch = next(iter(module(shards).train_dataloader()))
    assert isinstance(batch, RolloutBatch)
    assert batch.split == "train"
    assert batch.groups == []
    for got in batch.tasks:
        assert got == task(int(got.id.removeprefix("task-")))


def test_no_batch_holds_a_task_twice(shards: Path) -> None:
    for batch in ids(module(shards).train_dataloader(), 50):
        assert len(set(batch)) == 4


def test_seed_fixes_the_order(shards: Path) -> None:
    orders = [ids(module(shards, seed=seed).train_dataloader(), 6) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_ranks_share_each_batch(shards: Path) -> None:
    whole = ids(module(shards).train_dataloader(), 6)
    parts = [ids(on_rank(module(shards), rank, 2).train_dataloader(), 6) for rank in range(2)]
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == [sorted(batch) for batch in whole]
    assert {len(batch) for part in parts for batch in part} == {2}


def test_unequal_shares_are_refused(shards: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="prompts_per_step = 4 cannot be shared equally by 3 ranks; set it to 3"
    ):
        on_rank(module(shards), 0, 3).train_dataloader()
    data = on_rank(module(shards, prompts_per_step=3, val_shards=shards), 0, 3)
    with pytest.raises(ConfigurationError, match="val_tasks = 10 cannot be shared equally by 3 ranks; set it to 9"):
        data.val_dataloader()


def test_validation_has_a_greedy_and_a_sampled_pass(shards: Path) -> None:
    data = module(shards, val_shards=shards, val_batch=4)
    loaders: list[Any] = data.val_dataloader()
    assert [len(loader) for loader in loaders] == [3, 3]
    for loader, split in zip(loaders, ("val_greedy", "val_sampled"), strict=True):
        batches = list(loader)
        assert {batch.split for batch in batches} == {split}
        assert ids(batches, 9) == [[f"task-{i}" for i in range(a, min(a + 4, 10))] for a in (0, 4, 8)]


def test_validation_batches_are_new_each_time(shards: Path) -> None:
    data = module(shards, val_shards=shards)
    loader = data.val_dataloader()[0]
    first = next(iter(loader))
    first.groups.append(TrajectoryGroup(task=first.tasks[0], trajectories=()))
    assert next(iter(loader)).groups == []


def test_validation_is_limited_and_shared(shards: Path) -> None:
    taken = []
    for rank in range(2):
        data = on_rank(module(shards, val_shards=shards, val_tasks=6, val_batch=2), rank, 2)
        taken.append(ids(data.val_dataloader()[1], 9))
    assert taken == [[["task-0", "task-2"], ["task-4"]], [["task-1", "task-3"], ["task-5"]]]


def test_trainer_hands_on_the_very_batch(shards: Path) -> None:
    class Keeper(Recorder):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch.groups.append("filled in place")

        def training_step(self, batch: Any, batch_idx: int) -> None:
            assert batch.groups == ["filled in place"]
            super().training_step(batch, batch_idx)

    keeper = Keeper()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*overridden.*")
        trainer(3, val_check_interval=2).fit(keeper, datamodule=module(shards, val_shards=shards))
    assert len(keeper.trained) == 3
    assert keeper.validated == [(2, "val_greedy"), (2, "val_sampled")]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_batches_pass_through_every_precision(shards: Path, precision: Any) -> None:
    recorder = Recorder()
    trainer(2, precision=precision).fit(recorder, datamodule=module(shards))
    assert len(recorder.trained) == 2


def test_long_prompts_are_refused_and_named(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    def prompt_tokens(of: Task) -> int:
        return 100 + int(of.id.removeprefix("task-"))

    with caplog.at_level(logging.WARNING):
        data = module(shards, prompt_tokens=prompt_tokens, max_prompt_tokens=108, max_dropped=0.1)
        assert data.n_tasks == 9
    assert "1 of 10 rows dropped: too_long 1 (task-9: 109 tokens)" in caplog.text
    assert not any("task-9" in batch for batch in ids(data.train_dataloader(), 20))
    with pytest.raises(DataError, match=r"too_long 2 \(task-8: 108 tokens, task-9: 109 tokens\)"):
        module(shards, prompt_tokens=prompt_tokens, max_prompt_tokens=107, max_dropped=0.1).setup()


def test_settings_that_cannot_work_are_refused(shards: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_prompt_tokens = 9 needs prompt_tokens"):
        module(shards, max_prompt_tokens=9)
    with pytest.raises(ConfigurationError, match="val_batch"):
        module(shards, val_batch=0)
    with pytest.raises(ConfigurationError, match="takes 11 distinct rows"):
        module(shards, prompts_per_step=11).train_dataloader()


def test_folders_are_joined(shards: Path, tmp_path: Path) -> None:
    write_rl_shards([task(20)], tmp_path / "more")
    assert module([shards, tmp_path / "more"]).n_tasks == 11


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompts_per_step", "2"), ("prompts_per_step", 0), ("val_batch", -1), ("val_tasks", 0), ("seed", -1)],
)
def test_settings_that_are_no_counts_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}; set at least"):
        SearchVLRLDataModule(tmp_path, **{"prompts_per_step": 2, name: value})


def test_tasks_on_another_machine_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"http://a/b lies on another machine: copy the folder"):
        SearchVLRLDataModule("http://a/b", prompts_per_step=1).setup()
