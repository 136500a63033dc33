"""The ablation's table and figures, from the folders of its runs."""

from __future__ import annotations

from pathlib import Path

ARMS = ("vanilla", "hard_mask", "fatal_mask", "fatal_clamp")
START = "start"


def write_ablation(out: Path) -> str:
    return ""
