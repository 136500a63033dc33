"""Fine-tuning on what its DataModule hands out: padded or packed, the same trajectories give the same losses."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from opensearch_lightning.data import SearchVLSFTDataModule
from opensearch_lightning.modules import AgenticSFT
from tests.data.rows import sft_shards
from tests.data.trainers import trainer
from tests.models.tiny import tiny_policy, tiny_processor


class Losses(L.Callback):
    """Keeps what each update and the validation behind the last logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep(trainer)

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def losses(folders: list[Path], **options: Any) -> list[dict[str, float]]:
    seen = Losses()
    module = AgenticSFT(
        tiny_policy(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        schedule="constant",
        warmup_ratio=0,
    )
    data = SearchVLSFTDataModule(folders, tiny_processor(), max_length=400, val_shards=folders, **options)
    trainer(3, seen, val_check_interval=3).fit(module, datamodule=data)
    return seen.logged


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("sft")
    return [sft_shards(root / "first", 8), sft_shards(root / "second", 4)]


def test_padded_and_packed_updates_are_the_same(folders: list[Path]) -> None:
    # with a window of one, padding sorts the rows of an update only among themselves
    padded = losses(folders, batch_size=4, window=1)
    assert {"train/loss/first", "train/loss/second", "val/loss/first"} <= padded[-1].keys()
    for options in ({"window": 1, "micro_batch": 1}, {"packing": "batch"}):
        for one, other in zip(padded, losses(folders, batch_size=4, **options), strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert other[name] == pytest.approx(value, rel=2e-4), name


def test_full_packs_of_a_mixture_train(folders: list[Path]) -> None:
    logged = losses(folders, batch_size=1, packing="tokens", weights={"first": 1, "second": 1})
    assert len(logged) == 4
    assert all(math.isfinite(value) for update in logged for value in update.values())
    assert logged[-1]["train/loss"] < logged[0]["train/loss"]
