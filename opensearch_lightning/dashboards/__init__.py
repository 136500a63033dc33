"""What a run leaves to look at: metrics as CSV and in W&B, trajectories as JSON, and the page made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opensearch_lightning.dashboards.records import trajectory_record, write_images
from opensearch_lightning.dashboards.report import write_report

if TYPE_CHECKING:
    from opensearch_lightning.dashboards.metrics_csv import MetricsCSV
    from opensearch_lightning.dashboards.weights_and_biases import wandb_logger

__all__ = ["MetricsCSV", "trajectory_record", "wandb_logger", "write_images", "write_report"]


def __getattr__(name: str) -> Any:
    """The loggers, late: a report needs no Lightning."""
    if name == "MetricsCSV":
        from opensearch_lightning.dashboards.metrics_csv import MetricsCSV

        return MetricsCSV
    if name == "wandb_logger":
        from opensearch_lightning.dashboards.weights_and_biases import wandb_logger

        return wandb_logger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
