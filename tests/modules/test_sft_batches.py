"""Fine-tuning on batches of several passes, packed and padded, whose rows come from several sources."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch, TokenizedSample, pack
from opensearch_lightning.modules import AgenticSFT
from tests.data.trainers import trainer
from tests.models.tiny import tiny_policy, tiny_renderer
from tests.modules.test_sft import SAMPLES, Batches, batch_of, expected_update, reference, sgd, steps

SOURCES = ("pictures", "text", "none")
OF_SAMPLES = [0, 1, 0, 0, 1]


def packed_of(samples: Sequence[TokenizedSample]) -> PackedBatch:
    renderer = tiny_renderer()
    return pack(samples, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size)


def sft_batch(*passes: tuple[Any, Sequence[int]], samples: Sequence[TokenizedSample] = SAMPLES) -> SFTBatch:
    """Passes of the samples of these numbers, each laid out by a function."""
    return SFTBatch(
        passes=tuple(lay([samples[number] for number in numbers]) for lay, numbers in passes),
        source_ids=tuple(torch.tensor([OF_SAMPLES[number] for number in numbers]) for _, numbers in passes),
        sources=SOURCES,
    )


LAYOUTS: dict[str, Any] = {
    "packed": lambda: packed_of(SAMPLES),
    "packed in any order": lambda: packed_of([SAMPLES[i] for i in (4, 2, 0, 1, 3)]),
    "padded": lambda: batch_of(SAMPLES),
    "single rows": lambda: sft_batch(*((batch_of, [i]) for i in range(5))),
    "packed single rows": lambda: sft_batch(*((packed_of, [i]) for i in range(5))),
    "packs": lambda: sft_batch((packed_of, [1, 0, 3]), (packed_of, [2, 4])),
    "both": lambda: sft_batch((packed_of, [3, 2]), (batch_of, [4, 0, 1])),
}


def fit(*batches: Any, val: Sequence[Any] = (), **options: Any) -> tuple[AgenticSFT, "Kept"]:
    settings = {"optimizer": sgd, "schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": None, **options}
    module, kept = AgenticSFT(tiny_policy(), **settings), Kept()
    run = trainer(len(batches), logger=kept, log_every_n_steps=1, val_check_interval=len(batches) if val else None)
    run.fit(module, datamodule=Batches(batches, val))
    return module, kept


class Kept(DummyLogger):
    """Keeps what is logged in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.seen.append(metrics)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return expected_update()


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_however_rows_are_laid_out_the_update_is_that_of_single_rows(
    expected: dict[str, Any], layout: str, micro_batch: int | None
) -> None:
    module, kept = fit(LAYOUTS[layout](), micro_batch=micro_batch)
    (logged,) = kept.seen
    assert logged["train/loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert logged["train/token_accuracy"] == pytest.approx(expected["accuracy"])
    assert logged["train/tokens"] == expected["tokens"]
    for name, moved in steps(module).items():
        torch.testing.assert_close(moved, expected["gradients"][name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_stands_in_one_row_of_a_pack_touches_no_other() -> None:
    # the pictures' rows are changed, text is not
    spoiled = [
        sample if source else replace(sample, token_ids=sample.token_ids.masked_fill(sample.step_ids >= 0, 301))
        for sample, source in zip(SAMPLES, OF_SAMPLES, strict=True)
    ]
    layout = (packed_of, [0, 1, 2, 3, 4])
    _, clean = fit(sft_batch(layout))
    _, changed = fit(sft_batch(layout, samples=spoiled))
    assert changed.seen[0]["train/loss/text"] == clean.seen[0]["train/loss/text"]
    assert abs(changed.seen[0]["train/loss/pictures"] - clean.seen[0]["train/loss/pictures"]) > 0.1


def of_source(source: int) -> float:
    with torch.no_grad():
        samples = [sample for sample, own in zip(SAMPLES, OF_SAMPLES, strict=True) if own == source]
        loss, _, tokens = reference(tiny_policy(), samples)
    return float(loss) / tokens


@pytest.mark.parametrize("lay", [packed_of, batch_of])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_each_source_has_its_loss_in_the_steps_that_hold_it(lay: Any, micro_batch: int | None) -> None:
    whole, text = sft_batch((lay, [0, 1]), (lay, [2, 3, 4])), sft_batch((lay, [1, 4]))
    # a learning rate of 0: later steps see the same policy
    _, kept = fit(whole, text, lr=0.0, optimizer=None, micro_batch=micro_batch, val=[whole, text])
    first, second, validated = kept.seen
    assert first["train/loss/pictures"] == pytest.approx(of_source(0), rel=1e-5)
    assert first["train/loss/text"] == pytest.approx(of_source(1), rel=1e-5)
    assert second["train/loss"] == pytest.approx(of_source(1), rel=1e-5)
    assert {name for name in first if "loss/" in name} == {"train/loss/pictures", "train/loss/text"}
    assert {name for name in second if "loss/" in name} == {"train/loss/text"}
    assert validated["val/loss/pictures"] == pytest.approx(of_source(0), rel=1e-5)
    assert validated["val/loss/text"] == pytest.approx(of_source(1), rel=1e-5)
    assert {name for name in validated if "loss/" in name} == {"val/loss/pictures", "val/loss/text"}


def test_a_single_source_needs_no_loss_of_its_own() -> None:
    batch: ModelBatch = batch_of(SAMPLES[:2])
    one = SFTBatch(passes=(batch,), source_ids=(torch.zeros(2, dtype=torch.long),), sources=("pictures",))
    _, kept = fit(one)
    assert not any("loss/" in name for name in kept.seen[0])
