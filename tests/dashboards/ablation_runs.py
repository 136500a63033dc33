"""Folders as ``opensearch ablation`` leaves them, with figures of one's own."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path


def leave_run(
    out: Path,
    seed: int,
    arm: str,
    *,
    accuracy: float = 0.5,
    turns: float = 4.0,
    fatal: float = 0.25,
    curve: Sequence[float] = (),
    scores: Sequence[tuple[int, float]] = (),
) -> Path:
    """One arm of one seed; ``curve`` is its batch accuracy, step by step, and a run without one did not train."""
    folder = out / f"seed_{seed}" / arm
    folder.mkdir(parents=True)
    cell = {"n": 4, "accuracy": accuracy, "reward": accuracy, "turns": turns + 1, "tool_calls": turns,
            "fatal_fraction": fatal, "invalid_fraction": 0.0}  # fmt: skip
    result = {"seed": seed, "arm": arm, "evaluation": {"greedy": cell, "sampled": cell}, "train_s": 1, "evaluate_s": 1}
    (folder / "result.json").write_text(json.dumps(result))
    if curve:
        columns = ["step", "train/accuracy", "train/tool_calls", "train/fatal_fraction"]
        _write_csv(folder / "metrics.csv", columns, [(i, value, turns, fatal) for i, value in enumerate(curve)])
    if scores:
        columns = ["step", "task_id", "rollout", "fatal", "reward", "raw", "advantage"]
        rows = [(0, "a", i, is_fatal, 0, raw, raw) for i, (is_fatal, raw) in enumerate(scores)]
        _write_csv(folder / "advantages.csv", columns, rows)
    return folder


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
