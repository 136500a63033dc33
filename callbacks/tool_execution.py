"""Owns the tool executor's life and logs what the tools did."""

from __future__ import annotations

import asyncio
from typing import Any

import lightning as L

from opensearch_lightning.tools import ToolExecutor


class ToolExecution(L.Callback):
    """Logs calls, errors by kind, cache hits and latencies of every tool, a training step at a time.

    Calls made during validation are left out, so that the counts of a step are those of its rollouts.

    Args:
        executor: the one that RolloutGeneration was given; it is closed at the end.
    """

    def __init__(self, executor: ToolExecutor) -> None:
        self.executor = executor

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start the executor's threads before the first call needs them."""
        self.executor.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Cancel what runs and free threads and files."""
        asyncio.run(self.executor.aclose())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting: this callback stands before the rollouts."""
        self.executor.reset()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the counts of this step's rollouts."""
        figures: dict[str, float] = {}
        for name, tool in self.executor.metrics().tools.items():
            figures[f"tools/{name}/calls"] = float(tool.calls)
            figures[f"tools/{name}/cache_hits"] = float(tool.cache_hits)
            for kind, count in tool.errors.items():
                figures[f"tools/{name}/errors/{kind}"] = float(count)
            if tool.latency_p50_s is not None and tool.latency_p95_s is not None:
                figures[f"tools/{name}/latency_p50_s"] = tool.latency_p50_s
                figures[f"tools/{name}/latency_p95_s"] = tool.latency_p95_s
        pl_module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)
