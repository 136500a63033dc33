"""The scripts that start runs: their syntax, and a run of two processes on this machine."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_syntax_and_a_summary(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
    assert os.access(script, os.X_OK)


def test_a_missing_setting_is_named() -> None:
    environment = {**os.environ, "TRAIN_GPUS": ""}
    environment.pop("TRAINERS", None)
    command = [str(ROOT / "scripts/launch_torchrun.sh"), "experiment=quickstart_grpo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "set TRAINERS, as TRAIN_GPUS is empty" in done.stderr


def test_two_processes_train_and_go_on(tmp_path: Path, tiny: dict[str, Path]) -> None:
    """Two ranks on the CPU share each step's prompts, agree on every update, and resume."""
    run_dir = tmp_path / "run"
    settings = [
        "experiment=quickstart_grpo",
        f"run_dir={run_dir}",
        f"model.path={tiny['model']}",
        f"data_dir={tiny['root']}",
        f"data.shards={tiny['rl']}",
        "data.val_shards=null",
        "data.prompts_per_step=4",
        "callbacks.rollout_generation.group_size=2",
        "callbacks.rollout_generation.max_turns=2",
        "callbacks.rollout_generation.max_turn_tokens=8",
        "rollout.engine.max_length=4096",
        "tools.executor.cache=null",
        "trainer.strategy=ddp",
        "logger=csv",
        "export=null",
    ]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    environment = {
        **os.environ,
        "TRAIN_GPUS": "",
        "ROLLOUT_GPUS": "",
        "TRAINERS": "2",
        "PYTHON": sys.executable,
        "MASTER_PORT": port,
    }
    script = str(ROOT / "scripts/launch_torchrun.sh")
    for steps, more in ((2, []), (3, [f"ckpt_path={run_dir}/checkpoints/last.ckpt"])):
        command = [script, *settings, f"trainer.max_steps={steps}", *more]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "rror" in line)
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    assert [int(row["step"]) for row in rows] == [0, 1, 2]
    assert all(float(row["train/ratio_max_error"]) < 1e-3 for row in rows)
