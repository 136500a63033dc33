"""The quickstart from end to end at the smallest sizes: every stage, the table, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opensearch_lightning.cli import main
from opensearch_lightning.quickstart import Quickstart, Sizes, render_table

SIZES = Sizes(pages=40, sft_tasks=16, rl_tasks=16, val_tasks=2, test_tasks=3, vocabulary=1024)


def cell(accuracy: float, *, fatal: float = 0.0) -> dict[str, float]:
    return {"n": 4, "accuracy": accuracy, "stderr": 0.25, "fatal_fraction": fatal, "turns": 2.0}


def test_all_stages_run_and_leave_a_table_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    two_steps = ["trainer.max_steps=2", "trainer.val_check_interval=2"]
    rows = Quickstart(out, seed=5, sizes=SIZES, overrides=two_steps).run()
    assert [row["name"] for row in rows] == [
        "untrained",
        "after SFT",
        "after GRPO",
        "SFT continued",
        "GRPO policy, tools off",
    ]
    four = {"greedy", "sampled", "greedy_faults", "sampled_faults"}
    assert [set(row["cells"]) for row in rows] == [four] * 4 + [{"greedy", "sampled"}]
    assert all(figures["n"] == 3 for row in rows for figures in row["cells"].values())
    saved = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert saved["rows"] == rows
    assert saved["meta"]["seed"] == 5
    assert saved["meta"]["sft_continued_s"] > 0
    for stage in ("sft", "grpo", "sft_continued"):
        assert (out / stage / "policy" / "model.safetensors").is_file()
    assert "GRPO policy, tools off" in (out / "report.html").read_text(encoding="utf-8")


def test_table_shows_percent_with_errors_and_the_fatal_share() -> None:
    rows = [
        {"name": "after SFT", "cells": {"greedy": cell(0.5), "sampled_faults": cell(0.25, fatal=0.75)}},
        {"name": "tools off", "cells": {"greedy": cell(0.0)}},
    ]
    lines = render_table(rows).splitlines()
    assert [column.strip() for column in lines[2].split("|")[1:-1]] == [
        "after SFT",
        "50.0 ± 25.0",
        "",
        "",
        "25.0 ± 25.0",
        "75%",
    ]
    assert [column.strip() for column in lines[3].split("|")[1:-1]] == ["tools off", "0.0 ± 25.0", "", "", "", ""]
    assert lines[-1].startswith("n = 4 held-out tasks")


def test_an_existing_folder_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["quickstart", "--out", str(tmp_path)]) == 2
    assert "choose another --out, or --fresh to remove it first" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
