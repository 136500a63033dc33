"""A training run of one weight, to test launching, interrupting and resuming without a language model.

Every module keeps the numbers it was trained on, so that a test can compare an interrupted run with a whole one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class ToyPolicy(nn.Module):
    """One weight; stands for a language model and saves itself like one."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True)
        torch.save(self.state_dict(), Path(folder, "model.pt"))


class ToyProcessor:
    """Saves itself, no more."""

    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "processor.json").write_text("{}")


class _Numbers(IterableDataset):
    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while True:
            yield number
            number += 1


class ToyData(L.LightningDataModule):
    """The numbers 0, 1, 2, … without end; a checkpoint holds how many were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Numbers(self.first), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(4.0), batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"first": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]


class ToyModule(L.LightningModule):
    """Adds each number to the weight.

    Args:
        policy: the weight.
        log: file that gets one line per training step and validation batch.
        interrupt: ``{"train": 3}`` sends this process SIGINT while it trains on number 3; ``{"validation": 2}`` in
            the third validation batch; ``"times"`` is how often.
    """

    def __init__(self, policy: nn.Module, *, log: str, interrupt: dict[str, int] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.log_file = Path(log)
        self.interrupt = interrupt or {}

    def _note(self, **entry: float) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _maybe_interrupt(self, place: str, number: int) -> None:
        if self.interrupt.get(place) == number:
            for _ in range(self.interrupt.get("times", 1)):
                os.kill(os.getpid(), signal.SIGINT)

    def training_step(self, batch: int, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(-(self.policy.weight * batch).sum())
        self._maybe_interrupt("train", batch)
        optimizer.step()
        optimizer.zero_grad()
        self._note(train=batch)
        self.log("train/reward", float(batch))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._maybe_interrupt("validation", int(batch))
        self._note(validation=int(batch))
        self.log("val_sampled/accuracy", self.policy.weight[0].detach(), on_epoch=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=1.0)
