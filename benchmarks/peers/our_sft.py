"""The measured run of this package: its DataModule and its module of fine-tuning under a plain Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peers.measure import Recorder
from peers.sft_data import SFTSettings, digest

from opensearch_lightning.chat import PackedBatch, SFTBatch, collate, pack
from opensearch_lightning.data import SearchVLSFTDataModule, ShardKind, ShardReader
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.models import load_policy, load_processor, policy_logprobs
from opensearch_lightning.modules import AgenticSFT

_CHECKED = 8


def sample_source(shards: Path, policy: Path) -> SampleSource:
    """The rows as tokens. Tools stay out of the system turn, where the peer cannot put them."""
    return SampleSource(ShardReader(shards, kind=ShardKind.SFT), load_processor(policy), render_tools=False)


def data_module(shards: Path, policy: Path, *, batch: int, **options: Any) -> SearchVLSFTDataModule:
    """The DataModule that reads them, with its further options."""
    return SearchVLSFTDataModule(
        shards,
        load_processor(policy),
        batch_size=batch,
        render_tools=False,
        **options,
    )


def rows_of(batch: SFTBatch) -> int:
    """Trajectories of a batch."""
    return sum(len(one.valid) for one in batch.passes)


def stored_lengths(shards: Path) -> list[int]:
    """Tokens of each row, as measured when the shards were written."""
    (path,) = shards.glob("lengths-*.json")
    lengths: list[int] = json.loads(path.read_text(encoding="utf-8"))
    return lengths


class _TimedSFT(AgenticSFT):
    def __init__(self, policy: Any, recorder: Recorder, **options: Any) -> None:
        super().__init__(policy, **options)
        self._recorder = recorder

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self._recorder.timed("training_step_s"):
            super().training_step(batch, batch_idx)

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        with self._recorder.timed("backward_s"):
            super().manual_backward(loss, *args, **kwargs)


class _Record(L.Callback):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._recorder.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        tokens = sum(int(one.valid.sum()) for one in batch.passes)
        places = sum(one.input_ids.numel() for one in batch.passes)
        self._recorder.end_step(tokens=tokens, places=places, rows=rows_of(batch))


def run(settings: SFTSettings, *, packed: bool) -> dict[str, Any]:
    """Train an epoch and tell what was measured."""
    recorder = Recorder()
    torch.manual_seed(settings.seed)
    policy = load_policy(settings.policy)
    recorder.figures.update(_compared(policy, settings, packed=packed))
    packing = "batch" if packed else "off"
    data = data_module(settings.shards, settings.policy, batch=settings.batch, packing=packing, seed=settings.seed)
    module = _TimedSFT(policy, recorder, lr=settings.lr, schedule="constant", warmup_ratio=0.0)
    trainer = L.Trainer(
        max_steps=settings.rows // settings.batch,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Record(recorder)],
    )
    trainer.fit(module, data)
    recorder.figures["padding_of_epoch"] = 1 - data.packing_efficiency if not packed else 0.0
    return recorder.report()


def _compared(policy: Any, settings: SFTSettings, *, packed: bool) -> dict[str, Any]:
    """Loss of the first rows before training."""
    source = sample_source(settings.shards, settings.policy)
    samples = [source.sample(index) for index in range(_CHECKED)]
    options = {"image_token_id": source.renderer.image_token_id, "merge_size": source.renderer.merge_size}
    batch: Any = pack(samples, **options) if packed else collate(samples, pad_id=source.renderer.pad_id, **options)
    mask = batch.step_ids >= 0
    policy.train()
    with torch.no_grad():
        logprobs, _ = policy_logprobs(policy, batch, mask)
    assert packed == isinstance(batch, PackedBatch)
    return {
        "loss": float(-logprobs.sum() / mask.sum()),
        "digest": digest([(sample.token_ids.tolist(), (sample.step_ids >= 0).tolist()) for sample in samples]),
        "supervised": int(mask.sum()),
    }
