"""Logs how fast fine-tuning reads its trajectories, and how much of the devices' arithmetic that takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import PolicyShape, frozen_parts, training_flops
from opensearch_lightning.modules.sft_parts import as_sft_batch
from opensearch_lightning.modules.tally import Tally

PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L20": 119.5,
    "L4": 121,
}
"""Dense bfloat16 operations (10¹² a second) of devices, by a part of their names, from the makers' data sheets.

Tables that are twice as high count operations on sparse matrices, which training has none of.
"""


def peak_tflops(device_name: str) -> float | None:
    """Of :data:`PEAK_TFLOPS`, that of a device; ``None`` for one that is not there."""
    words = device_name.replace("-", " ").split()
    named = [name for name in PEAK_TFLOPS if all(part in words for part in name.split())]
    return PEAK_TFLOPS[max(named, key=len)] if named else None


class ThroughputLogging(L.Callback):
    """Logs, over all ranks and the steps since the last time, how fast fine-tuning goes.

    ``train/tokens_per_second`` (tokens read, padding left out), ``train/samples_per_second`` (trajectories),
    ``train/padding_fraction`` (of the places in padded rows), ``train/packing_efficiency`` (tokens over those of as
    many passes as full as the fullest: what uneven passes cost), ``train/data_wait_share`` (time between steps, in
    which ranks wait for data) and ``train/mfu``: the operations that the model needs (PaLM's model FLOPs utilization,
    arXiv 2204.02311) over the peak of the devices. It is left out where the peak is not known, and where neither the
    weights nor the precision are of 16 bits, as the peaks are.

    Time goes from the start of a step to its end, and on to the start of the next one unless a validation or a
    checkpoint came between. Everything is read off the device once in ``every_n_steps``.

    Args:
        every_n_steps: training batches between two logs; ``None``: as the Trainer logs.
        peak_tflops: dense operations (10¹² a second) of one device; ``None``: by its name.

    Raises:
        ConfigurationError: a setting below what works; in training, batches that are none of fine-tuning.
    """

    def __init__(self, *, every_n_steps: int | None = None, peak_tflops: float | None = None) -> None:
        if (every_n_steps is not None and every_n_steps < 1) or (peak_tflops is not None and not peak_tflops > 0):
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps} and peak_tflops {peak_tflops}; set 1 or more and above 0, or null"
            )
        self.every_n_steps, self.peak_tflops = every_n_steps, peak_tflops
        self._window = _Window()
        self._cost: _Cost | None = None
        self._started_s = 0.0
        self._ended_s: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count; the first batch is waited for longer than others."""
        self._window, self._ended_s = _Window(), None
        self._cost = _Cost.of(pl_module.policy, self._peak(trainer, pl_module.policy))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._started_s = time.perf_counter()
        if self._ended_s is not None:
            self._window.waited_s += self._started_s - self._ended_s

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step, and log every n-th time."""
        self._ended_s = time.perf_counter()
        self._window.stepped_s += self._ended_s - self._started_s
        self._window.count(batch)
        own: Any = trainer
        every = self.every_n_steps or own.log_every_n_steps
        if every and (batch_idx + 1) % every == 0:
            figures = self._window.figures(trainer, self._cost)
            pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)
            self._window = _Window()
            # what was spent here is no wait for data
            self._ended_s = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the time until the next step out."""
        self._ended_s = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Leave the time until the next step out."""
        self._ended_s = None

    def _peak(self, trainer: L.Trainer, policy: Any) -> float | None:
        halves = "16" in str(trainer.precision) or next(policy.parameters()).dtype in (torch.bfloat16, torch.float16)
        if self.peak_tflops is not None or not halves:
            return self.peak_tflops
        device = trainer.strategy.root_device
        return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """What the operations of a policy are, and what a device could do (10¹² a second)."""

    shape: PolicyShape
    frozen: frozenset[str]
    peak: float

    @classmethod
    def of(cls, policy: Any, peak: float | None) -> _Cost | None:
        if peak is None:
            return None
        return cls(shape=PolicyShape.of(policy.config), frozen=frozen_parts(policy), peak=peak)


@dataclass(kw_only=True)
class _Window:
    """What the steps since the last log read, still on the device, and how long they took."""

    stepped_s: float = 0.0
    waited_s: float = 0.0
    samples: int = 0
    places: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    supervised: list[Tensor] = field(default_factory=list)
    patches: list[Tensor] = field(default_factory=list)

    def count(self, batch: Any) -> None:
        if not isinstance(batch, ModelBatch | PackedBatch | SFTBatch):
            raise ConfigurationError(
                f"ThroughputLogging counts batches of fine-tuning, and this one is {type(batch).__name__}: leave it out"
            )
        for one in as_sft_batch(batch).passes:
            self.samples += len(one.step_ids)
            self.places.append(one.input_ids.numel())
            # a prompt that several sequences share is read once
            if isinstance(one, PackedBatch):
                self.segments += [segment.length for segment in one.segments]
            else:
                self.lengths.append(one.valid.sum(1))
            self.supervised.append((one.step_ids >= 0).sum())
            if one.image_grid_thw is not None:
                self.patches.append(one.image_grid_thw.prod(-1))

    def figures(self, trainer: L.Trainer, cost: _Cost | None) -> dict[str, float]:
        """Of all ranks."""
        lengths = self.segments + _numbers(self.lengths)
        tally = Tally()
        tally.add(tokens=sum(lengths), places=sum(self.places), passes=len(self.places), samples=self.samples)
        tally.add(stepped_s=self.stepped_s, waited_s=self.waited_s, flops=self._flops(lengths, cost))
        tally.raise_to(fullest=max(self.places), seconds=self.stepped_s + self.waited_s)
        sums, highest = tally.over_ranks(trainer.strategy, trainer.strategy.root_device)
        seconds = highest["seconds"]
        figures = {
            "tokens_per_second": sums["tokens"] / seconds,
            "samples_per_second": sums["samples"] / seconds,
            "padding_fraction": 1 - sums["tokens"] / sums["places"],
            "packing_efficiency": sums["tokens"] / (sums["passes"] * highest["fullest"]),
            "data_wait_share": sums["waited_s"] / (sums["stepped_s"] + sums["waited_s"]),
        }
        if cost is not None:
            figures["mfu"] = sums["flops"] / (seconds * trainer.world_size * cost.peak * 1e12)
        return {f"train/{name}": value for name, value in figures.items()}

    def _flops(self, lengths: Sequence[int], cost: _Cost | None) -> float:
        if cost is None:
            return 0.0
        supervised, patches = sum(_numbers(self.supervised)), _numbers(self.patches)
        return training_flops(cost.shape, lengths=lengths, supervised=supervised, patches=patches, frozen=cost.frozen)


def _numbers(tensors: Sequence[Tensor]) -> list[int]:
    if not tensors:
        return []
    numbers: list[int] = torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
    return numbers
