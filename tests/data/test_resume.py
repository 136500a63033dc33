from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from opensearch_lightning.data import SearchVLRLDataModule, SearchVLSFTDataModule
from opensearch_lightning.data.loader import ResumableDataModule
from opensearch_lightning.errors import ConfigurationError
from tests.data.rows import rl_shards, sft_shards
from tests.data.trainers import Broken, Recorder, checkpoints, key, trainer
from tests.models.tiny import tiny_processor
from tests.strategies import cpu_ranks

N = 11
Make = Callable[..., L.LightningDataModule]


@pytest.fixture(scope="module")
def make_rl(tmp_path_factory: pytest.TempPathFactory) -> Make:
    shards = rl_shards(tmp_path_factory.mktemp("rl") / "s", 10)
    return lambda **options: SearchVLRLDataModule(
        shards, prompts_per_step=3, val_shards=shards, val_batch=10, **options
    )


@pytest.fixture(scope="module")
def make_sft(tmp_path_factory: pytest.TempPathFactory) -> Make:
    shards = sft_shards(tmp_path_factory.mktemp("sft") / "s", 10)
    return lambda **options: SearchVLSFTDataModule(
        shards, tiny_processor(), batch_size=3, val_shards=shards, val_batch_size=10, **options
    )


@pytest.fixture(params=["rl", "sft"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.getfixturevalue(f"make_{request.param}")


def fit(data: L.LightningDataModule, run: L.Trainer, *, ckpt_path: Path | None = None, **options: Any) -> Recorder:
    module = Recorder(**options)
    run.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return module


def whole(make: Make, **options: Any) -> Recorder:
    """A run that nothing interrupts."""
    return fit(make(), trainer(N, **options))


def test_batches_go_on_through_epochs(make: Make) -> None:
    trained = whole(make).trained
    assert len(trained) == N
    assert len(set(trained)) > 6  # three batches an epoch
    assert trained == whole(make).trained


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_checkpoint_resumes_exactly(make: Make, tmp_path: Path, num_workers: int) -> None:
    expected = whole(make).trained
    fit(make(num_workers=num_workers), trainer(N - 1, checkpoints(tmp_path, every_n_train_steps=1)))
    steps = (1, 3, 4, 7) if num_workers == 0 else (4,)
    for step in steps:
        resumed = fit(make(num_workers=num_workers), trainer(N), ckpt_path=tmp_path / f"{step}.ckpt")
        assert resumed.trained == expected[step:], step


def test_resumed_runs_resume_in_turn(make_rl: Make, tmp_path: Path) -> None:
    expected = whole(make_rl).trained
    trained: list[Any] = []
    for step in range(2, N + 2, 2):
        before = tmp_path / f"{step - 2}.ckpt" if step > 2 else None
        run = trainer(min(step, N), checkpoints(tmp_path, every_n_train_steps=2))
        trained += fit(make_rl(), run, ckpt_path=before).trained
    assert trained == expected


def test_checkpoint_of_a_validation_resumes_exactly(make: Make, tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, save_on_train_epoch_end=False)
    expected = fit(make(), trainer(N, saving, val_check_interval=3)).trained
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.ckpt", "6.ckpt", "9.ckpt"]
    for step in (3, 6, 9):
        resumed = fit(make(), trainer(N, val_check_interval=3), ckpt_path=tmp_path / f"{step}.ckpt")
        assert resumed.trained == expected[step:]
        # validation goes on in the rhythm of the run that was never interrupted
        assert {at for at, _ in resumed.validated} == {at for at in (3, 6, 9) if at > step}


def test_validation_keeps_its_rhythm_between_checkpoints(make_rl: Make, tmp_path: Path) -> None:
    fit(make_rl(), trainer(5, checkpoints(tmp_path, every_n_train_steps=5), val_check_interval=3))
    resumed = fit(make_rl(), trainer(N, val_check_interval=3), ckpt_path=tmp_path / "5.ckpt")
    assert sorted({at for at, _ in resumed.validated}) == [6, 9]


def test_interrupted_step_is_trained_again(make: Make, tmp_path: Path) -> None:
    expected = whole(make).trained
    with pytest.raises(Broken):
        fit(make(), trainer(N, checkpoints(tmp_path, save_on_exception=True)), break_at=5)
    (saved,) = tmp_path.iterdir()
    assert fit(make(), trainer(N), ckpt_path=saved).trained == expected[5:]


def test_several_updates_a_batch(make_rl: Make, tmp_path: Path) -> None:
    expected = fit(make_rl(), trainer(4 * 5), updates=4).trained
    assert len(expected) == 5
    fit(make_rl(), trainer(4 * 3, checkpoints(tmp_path, every_n_train_steps=4)), updates=4)
    resumed = fit(make_rl(), trainer(4 * 5), updates=4, ckpt_path=tmp_path / "8.ckpt")
    assert resumed.trained == expected[2:]


def test_limited_epochs_do_not_start_over(make: Make) -> None:
    assert whole(make, limit_train_batches=2).trained == whole(make).trained


def test_loaders_asked_for_early_do_not_shift_the_order(make: Make, tmp_path: Path) -> None:
    class Early(Recorder):
        def configure_optimizers(self) -> Any:
            # with a limit of epochs this sets up the loaders, before Lightning has restored its counters
            assert self.trainer.estimated_stepping_batches == self.trainer.max_steps
            return super().configure_optimizers()

    def fit_early(saving: ModelCheckpoint, ckpt_path: Path | None = None) -> Recorder:
        module = Early()
        run = trainer(N, saving, max_epochs=99)
        run.fit(module, datamodule=make(), ckpt_path=ckpt_path, weights_only=False)
        return module

    expected = fit_early(checkpoints(tmp_path / "1", every_n_train_steps=2)).trained
    resumed = fit_early(checkpoints(tmp_path / "2", every_n_train_steps=2), tmp_path / "1" / "4.ckpt")
    assert resumed.trained == expected[4:]
    again = fit_early(checkpoints(tmp_path / "3"), tmp_path / "2" / "6.ckpt")
    assert again.trained == expected[6:]


def test_one_datamodule_serves_several_runs(make_rl: Make, tmp_path: Path) -> None:
    data = make_rl()
    expected = fit(data, trainer(N, checkpoints(tmp_path, every_n_train_steps=4))).trained
    assert fit(data, trainer(N), ckpt_path=tmp_path / "4.ckpt").trained == expected[4:]
    assert fit(data, trainer(N)).trained == expected


def test_state_serves_without_a_trainer(make: Make) -> None:
    expected = whole(make).trained
    data: Any = make()
    data.setup()
    data.load_state_dict({**data.state_dict(), "batches": 4})
    assert data.state_dict()["batches"] == 4
    batches = iter(data.train_dataloader())
    assert [key(next(batches)) for _ in range(3)] == expected[4:7]
    assert fit(data, trainer(N - 4)).trained == expected[4:]
    assert data.state_dict()["batches"] == N


def test_checkpoint_of_another_order_is_refused(make: Make, tmp_path: Path) -> None:
    fit(make(), trainer(2, checkpoints(tmp_path, every_n_train_steps=2)))
    with pytest.raises(ConfigurationError, match="made with seed = 3407, now it is 1: the order of the data would"):
        fit(make(seed=1), trainer(N), ckpt_path=tmp_path / "2.ckpt")


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mixed")
    return [sft_shards(folder / "first", 12, chunk_bytes=2000), sft_shards(folder / "second", 7)]


PLANS: dict[str, dict[str, Any]] = {
    "off": {"batch_size": 2, "micro_batch": 1},
    "batch": {"batch_size": 2, "packing": "batch"},
    "tokens": {"packing": "tokens"},
    "mixture": {"packing": "tokens", "weights": {"first": 1, "second": 2}, "chunk_window": 2},
}


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_with_workers_resume_exactly(two_sources: list[Path], tmp_path: Path, plan: str) -> None:
    def make(**options: Any) -> SearchVLSFTDataModule:
        settings = {"batch_size": 1, "max_length": 400, "pack_tokens": 500, **PLANS[plan], **options}
        return SearchVLSFTDataModule(two_sources, tiny_processor(), **settings)

    def run(max_steps: int, *callbacks: ModelCheckpoint) -> L.Trainer:
        return cpu_ranks.trainer("ddp", max_steps, *callbacks, enable_checkpointing=bool(callbacks))

    def work() -> dict[str, Any]:
        data = make()
        whole = fit(data, run(24)).trained
        epochs = [data.epoch_of(number) for number in range(24)]
        # in the middle of the first epoch, and of the one after it
        steps = [2, epochs.index(1) + 2]
        fit(make(num_workers=2), run(steps[1], checkpoints(tmp_path / "saved", every_n_train_steps=1)))
        resumed = {
            step: fit(make(num_workers=2), run(24), ckpt_path=tmp_path / "saved" / f"{step}.ckpt").trained
            for step in steps
        }
        return {"whole": whole, "epochs": epochs, "resumed": resumed}

    ranks = cpu_ranks.on_ranks(work, tmp_path / "ranks")
    assert ranks[0]["epochs"] == ranks[1]["epochs"]
    assert {0, 1, 2} <= set(ranks[0]["epochs"])
    assert all(one != two for one, two in zip(ranks[0]["whole"], ranks[1]["whole"], strict=True))
    for rank in ranks:
        assert len(rank["whole"]) == 24
        assert len(rank["resumed"]) == 2
        for step, trained in rank["resumed"].items():
            assert trained == rank["whole"][step:], step


class Ordered(ResumableDataModule):
    def __init__(self, **order: int | str) -> None:
        super().__init__()
        self.order = order

    def _order(self) -> Mapping[str, int | str]:
        return self.order


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({"global_batch": 6}, {"global_batch": 3}, "made with world size × batch_size = 6, now it is 3: the order"),
        ({"rows": 9}, {"rows": 8}, "made with usable rows = 9, now it is 8: the order"),
        ({"tokens": "3fa9"}, {"tokens": "77c0"}, "^the rows, the processor or the tools changed since the checkpoint"),
        ({"shards": "3fa9"}, {"shards": "77c0"}, "^the tasks in the shards changed since the checkpoint was made: the"),
    ],
)
def test_refusal_says_in_words_what_changed(
    then: dict[str, int | str], now: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Ordered(**now).load_state_dict(Ordered(**then).state_dict())
    assert "3fa9" not in str(caught.value)
