"""The W&B logger: offline, nothing but metrics, and every row of every process kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from opensearch_lightning.dashboards import wandb_logger
from opensearch_lightning.errors import ConfigurationError


def history(path: Path) -> list[dict[str, float]]:
    """Rows of a ``.wandb`` file: a header, then blocks of 32 KiB with (checksum, length, kind) before each record."""
    from wandb.proto import wandb_internal_pb2

    data, rows, at = path.read_bytes(), [], 7
    while at + 7 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            cells = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in cells.items() if not key.startswith("_")})
    return rows


def test_an_offline_run_that_resumes_keeps_the_rows_of_both_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    for first, last in ((0, 3), (2, 4)):
        logger = wandb_logger(tmp_path / "grpo")
        for step in range(first, last):
            logger.log_metrics({"train/loss": step / 10}, step=step)
            logger.log_metrics({"val/accuracy": step / 5}, step=step)
        logger.experiment.finish()
        wandb.teardown()  # a run's file is complete once the service that writes it has ended, as at a process's end

    files = sorted(tmp_path.glob("grpo/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    steps = [[row["trainer/global_step"] for row in history(path)] for path in files]
    assert steps == [[0, 0, 1, 1, 2, 2], [2, 2, 3, 3]]
    assert len({path.stem for path in files}) == 2, "two processes under one W&B id: the second's first rows get lost"
    assert not list(tmp_path.rglob("requirements.txt")) and not list(tmp_path.rglob("*.py"))


def test_nothing_starts_before_something_is_logged(tmp_path: Path) -> None:
    logger = wandb_logger(tmp_path / "run", offline=False)
    assert logger.version is None
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.loggers.wandb as lightning_wandb

    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="pip install wandb"):
        wandb_logger(tmp_path)
