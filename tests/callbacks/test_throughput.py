from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from opensearch_lightning.callbacks import ThroughputLogging
from opensearch_lightning.callbacks.throughput import peak_tflops
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import PolicyShape, training_flops
from opensearch_lightning.modules import AgenticSFT
from tests.data.trainers import trainer
from tests.models.tiny import tiny_policy
from tests.modules.test_sft import SAMPLES, Batches, batch_of, sgd
from tests.modules.test_sft_batches import packed_of, sft_batch

LENGTHS = [len(sample.token_ids) for sample in SAMPLES]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_by_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops


class Clock:
    """A clock that stands still but for what a step, a wait, a validation or a checkpoint takes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr("opensearch_lightning.callbacks.throughput.time.perf_counter", stopped)
    return stopped


class Slow(AgenticSFT):
    """Steps of 2 seconds, validation batches of 50."""

    clock: Clock

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.passes(2)
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.passes(50)
        super().validation_step(batch, batch_idx)


class SlowBatches(Batches):
    """Each batch is waited for half a second."""

    clock: Clock

    def train_dataloader(self) -> Any:
        def waiting(batch: Any) -> Any:
            self.clock.passes(0.5)
            return batch

        return torch.utils.data.DataLoader(self.train, batch_size=None, collate_fn=waiting)


class SlowCheckpoint(ModelCheckpoint):
    """Checkpoints of 30 seconds."""

    clock: Clock

    def _save_checkpoint(self, run: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(run, filepath)
        self.clock.passes(30)


def fit(clock: Clock, batches: Any, *callbacks: Any, policy: Any = None, val: Any = (), **options: Any) -> Any:
    kept: list[dict[str, float]] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            kept.append({name: float(value) for name, value in run.callback_metrics.items()})

    module = Slow(policy or tiny_policy(), optimizer=sgd, schedule="constant", warmup_ratio=0)
    data = SlowBatches(batches, val)
    module.clock = data.clock = clock
    trainer(len(batches), *callbacks, Keep(), log_every_n_steps=1, **options).fit(module, datamodule=data)
    return kept


def test_figures_of_padded_and_packed_passes(clock: Clock) -> None:
    wide = batch_of(SAMPLES[:3])
    (logged,) = fit(clock, [wide], ThroughputLogging())
    assert logged["train/tokens_per_second"] == pytest.approx(sum(LENGTHS[:3]) / 2)
    assert logged["train/samples_per_second"] == pytest.approx(1.5)
    assert logged["train/padding_fraction"] == pytest.approx(1 - sum(LENGTHS[:3]) / (3 * max(LENGTHS[:3])))
    assert "train/mfu" not in logged

    (logged,) = fit(clock, [sft_batch((packed_of, [0, 1]), (packed_of, [2, 3, 4]))], ThroughputLogging())
    first, second = sum(LENGTHS[:2]), sum(LENGTHS[2:])
    assert logged["train/tokens_per_second"] == pytest.approx((first + second) / 2)
    assert logged["train/samples_per_second"] == pytest.approx(2.5)
    assert logged["train/padding_fraction"] == 0
    assert logged["train/packing_efficiency"] == pytest.approx((first + second) / (2 * max(first, second)))


def test_the_time_is_that_of_steps_and_waits_alone(clock: Clock, tmp_path: Any) -> None:
    saving = SlowCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    saving.clock = clock
    # the first batches were there before the clock ran, and the last one is read ahead of its turn
    batches = [packed_of(SAMPLES)] * 5
    logged = fit(clock, batches, ThroughputLogging())
    assert speeds(logged) == pytest.approx([5 / 2, 5 / 2.5, 5 / 2.5, 5 / 2.5])
    assert [one["train/data_wait_share"] for one in logged[:4]] == pytest.approx([0, 0.2, 0.2, 0.2])

    validated = fit(clock, batches, ThroughputLogging(), val=[batch_of(SAMPLES)], val_check_interval=2)
    assert speeds(validated) == pytest.approx([2.5, 2.0, 2.5, 2.0])
    saved = fit(clock, batches, ThroughputLogging(), saving)
    assert speeds(saved) == pytest.approx([2.5] * 4)


def speeds(logged: Any) -> list[float]:
    return [one["train/samples_per_second"] for one in logged[:4]]


def test_several_steps_are_logged_as_one(clock: Clock) -> None:
    logged = fit(
        clock, [batch_of(SAMPLES[:1]), batch_of(SAMPLES), batch_of(SAMPLES)], ThroughputLogging(every_n_steps=2)
    )
    assert "train/tokens_per_second" not in logged[0]
    assert logged[1]["train/samples_per_second"] == pytest.approx((1 + 5) / (2 + 0.5 + 2))
    assert logged[2] == {**logged[2], "train/samples_per_second": logged[1]["train/samples_per_second"]}


@pytest.mark.parametrize("lay", [batch_of, packed_of])
def test_mfu_is_what_the_model_needs_over_what_the_device_can(clock: Clock, lay: Callable[..., Any]) -> None:
    policy = tiny_policy(train_vision=False)
    shape = PolicyShape.of(policy.config)
    batch = lay(SAMPLES)
    needed = training_flops(
        shape,
        lengths=LENGTHS,
        supervised=int((batch.step_ids >= 0).sum()),
        patches=batch.image_grid_thw.prod(-1).tolist(),
        frozen=("vision_tower", "projector"),
    )
    (logged,) = fit(clock, [batch], ThroughputLogging(peak_tflops=0.001), policy=policy)
    assert logged["train/mfu"] == pytest.approx(needed / 2 / 1e9)


def test_settings_and_batches_that_do_not_fit_are_named(clock: Clock) -> None:
    for wrong in ({"every_n_steps": 0}, {"peak_tflops": 0}):
        with pytest.raises(ConfigurationError, match="set 1 or more and above 0, or null"):
            ThroughputLogging(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="counts batches of fine-tuning, and this one is Tensor"):
        ThroughputLogging()._window.count(torch.zeros(1))
