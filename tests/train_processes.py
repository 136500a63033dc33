"""Runs of ``train.py`` in processes of their own, which tests kill, and what such runs log."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLOCKED = ("time/", "per_second", "mfu", "wait")
"""Parts of the names of what fine-tuning measures by the clock."""


def start(settings: Iterable[str]) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *settings], env=environment, stderr=subprocess.PIPE
    )


def finish(process: "subprocess.Popen[bytes]") -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]


def curves(run: Path, *, measured: Iterable[str]) -> list[dict[str, str]]:
    """Rows of ``metrics.csv`` without the columns that have a part of ``measured`` in their names."""
    with (run / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [{k: v for k, v in row.items() if not any(part in k for part in measured)} for row in rows]
