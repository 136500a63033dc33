"""Roles of a benchmark that run in processes of their own, one at a time, on one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_SETTINGS = {
    # one heap for all threads of either side, as the Makefile sets it: with one each, what a thread frees lies idle
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def environment_of_a_role(folder: Path) -> dict[str, str]:
    """One thread and one heap, this repository's package first, and the cache of data sets in ``folder``."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **_SETTINGS, "PYTHONPATH": path, "HF_DATASETS_CACHE": str(folder.resolve() / "hf")}


def run_apart(script: str, role: str, folder: Path, *options: str) -> dict[str, Any]:
    """Run ``script --role role --folder folder`` and read the report it leaves in ``folder/role.json``.

    The script's output goes to ``folder/role.log``, whose end is shown when it fails. ``process_s`` of the report is
    the time from the start of the process to its end.
    """
    environment = environment_of_a_role(folder)
    log, report = folder / f"{role}.log", folder / f"{role}.json"
    report.unlink(missing_ok=True)
    started = time.perf_counter()
    with log.open("wb") as output:
        command = [sys.executable, script, "--role", role, "--folder", str(folder), *options]
        code = subprocess.run(
            command, env=environment | {"STARTED_AT": repr(time.time())}, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"{role} ended with exit code {code}:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return {**found, "process_s": time.perf_counter() - started}


def write_report(role: str, folder: Path, report: dict[str, Any]) -> None:
    """Leave a role's figures for :func:`run_apart`."""
    (folder / f"{role}.json").write_text(json.dumps(report), encoding="utf-8")


def seconds_since_start() -> float:
    """Since :func:`run_apart` started this process."""
    return time.time() - float(os.environ["STARTED_AT"])
