"""GRPO through ``train.py`` on a tiny world: the same seed gives the same curves, also over a kill −9."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train_processes import curves, finish, start

MEASURED = ("time/", "latency", "cache_hits")
"""Columns that are measured, not computed: the clock, and whether a process had seen a call before."""


def settings_of(tiny: dict[str, Path], run: Path, *more: str) -> list[str]:
    return [
        "experiment=quickstart_grpo",
        f"run_dir={run}",
        f"data_dir={tiny['root']}",
        f"model.path={tiny['model']}",
        f"data.shards={tiny['rl']}",
        f"data.val_shards={tiny['rl']}",
        "data.prompts_per_step=2",
        "data.val_tasks=2",
        "reward._target_=tests.toy_reward.EvenTokens",
        *(f"~reward.{key}" for key in ("accuracy", "query", "alpha")),
        "rollout.engine.reproducible=true",
        "module.optimizer.lr=1e-2",
        "callbacks.rollout_generation.group_size=3",
        "callbacks.rollout_generation.max_turn_tokens=8",
        "callbacks.trajectory_log.every_n_steps=1",
        "trainer.max_steps=5",
        "trainer.val_check_interval=2",
        "logger=csv",
        "export=null",
        *more,
    ]


def prompts(run: Path) -> list[tuple[int, Any, Any]]:
    """Which task was rolled out at which step, from the trajectories on disk."""
    records = [json.loads(line) for file in sorted((run / "trajectories").glob("*.jsonl")) for line in file.open()]
    return [(r["global_step"], r["task_id"], r["rollout"]) for r in records if r["split"] == "train"]


@pytest.fixture(scope="module")
def whole(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("grpo") / "whole"
    finish(start(settings_of(tiny, run)))
    return run


def test_the_policy_moves(whole: Path) -> None:
    rows = curves(whole, measured=MEASURED)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert all(float(row["train/grad_norm"]) > 0 for row in rows)
    assert float(rows[0]["train/ratio_max_error"]) < 1e-5
    assert len({row["train/reward"] for row in rows}) > 1


def test_the_same_seed_gives_the_same_curves(tiny: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    finish(start(settings_of(tiny, tmp_path / "again")))
    assert curves(tmp_path / "again", measured=MEASURED) == curves(whole, measured=MEASURED)
    assert prompts(tmp_path / "again") == prompts(whole)


def test_kill_and_resume_gives_the_curves_of_an_undisturbed_run(
    tiny: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    process = start(settings_of(tiny, run))
    metrics = run / "metrics.csv"
    deadline = time.monotonic() + 300
    # the checkpoint holds two steps; rows of later ones must be there, to be replaced
    while not (metrics.exists() and len(curves(run, measured=MEASURED)) >= 4) and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = run / "checkpoints" / "last.ckpt"
    assert last.exists()
    before = len(curves(run, measured=MEASURED))
    finish(start(settings_of(tiny, run, f"ckpt_path={last}")))
    assert before >= 4
    assert curves(run, measured=MEASURED) == curves(whole, measured=MEASURED)
    assert prompts(run) == prompts(whole)
