"""The report: what it holds, what it says when something is missing, its size, its command."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opensearch_lightning.dashboards import write_report
from opensearch_lightning.dashboards.browse import select_trajectories
from opensearch_lightning.dashboards.cli import add_arguments, run
from opensearch_lightning.dashboards.curves import (
    Metrics,
    curve_charts,
    other_charts,
    thinned,
    tool_charts,
    tool_figures,
)
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.types import TrajectoryGroup
from tests.dashboards.sample_runs import (
    EVALUATION,
    HOSTILE,
    WORDS,
    make_grpo_run,
    make_hostile_run,
    make_sft_run,
    right_run,
    task,
    write_csv,
    write_trajectories,
)

ROWS = ["random weights", "after SFT", "after GRPO", "SFT continued"]


def data_of(page: Path) -> dict[str, Any]:
    """The JSON that the page embeds, found as a browser does: up to the first end tag."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script', page.read_text("utf-8"), re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def chart(charts: list[Any], title: str) -> Any:
    return next(item for item in charts if title in (item["title"] if isinstance(item, dict) else item.title))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return write_report([make_sft_run(root / "sft"), make_grpo_run(root / "grpo")], root / "out" / "report.html")


def test_runs_charts_results_and_trajectories_are_on_the_page(page: Path) -> None:
    data = data_of(page)
    sft, grpo = data["runs"]
    assert (sft["name"], sft["steps"], grpo["name"], grpo["steps"]) == ("sft", [4, 399], "grpo", [0, 59])
    titles = [item["title"] for item in grpo["charts"]]
    assert titles[:5] == ["Accuracy", "Turns", "Reward parts", "Fatal and clamped trajectories", "Bias of the clamp"]
    assert [item["label"] for item in chart(grpo["charts"], "Accuracy")["series"]] == [
        "training",
        "held-out, greedy",
        "held-out, sampled",
    ]
    assert [row["name"] for row in data["evaluation"]["rows"]] == ROWS
    assert data["found"] == len(data["trajectories"]) == 60
    assert {item["outcome"] for item in data["trajectories"]} == {"right", "wrong", "fatal"}
    assert all(image["file"] in data["images"] for item in data["trajectories"] for image in item["images"])
    assert data["notes"] == []


def test_the_page_asks_for_nothing_and_allows_only_its_own_script(page: Path) -> None:
    html = page.read_text("utf-8")
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    assert "unsafe" not in policy


def test_hostile_texts_stay_inside_the_data(tmp_path: Path) -> None:
    html = write_report([make_hostile_run(tmp_path / "run")], tmp_path / "report.html", title=HOSTILE).read_text(
        "utf-8"
    )
    assert html.lower().count("</script") == 2, "the page's own two"
    assert "<img" not in html and "<!--" not in html
    embedded = html[html.index('id="data">') : html.index("</script")]
    assert embedded.isascii(), "no line separator, and no character that turns the direction of text"
    assert data_of(tmp_path / "report.html")["trajectories"][0]["question"] == HOSTILE


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    notes = data_of(write_report([tmp_path / "empty", tmp_path / "gone"], tmp_path / "a.html"))["notes"]
    assert any("gone: there is no directory" in note for note in notes)
    assert any("empty: no curves, there is no" in note for note in notes)
    assert any("No held-out results" in note for note in notes)
    assert any("No trajectories" in note for note in notes)


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = make_grpo_run(tmp_path / "run", steps=20)
    (run_dir / "metrics.csv").write_text("a,b\n1,2\n")
    (run_dir / "evaluation.json").write_text('{"rows": [{"name": "x", "cells": {"greedy": {"n": 3}}}]')
    path = run_dir / "trajectories" / "train-00000000.jsonl"
    path.write_text(path.read_text() + '{"task_id": "torn\n{"steps": 3}\n')
    data = data_of(write_report([run_dir], tmp_path / "report.html"))
    assert any("no column 'step'" in note for note in data["notes"])
    assert any("evaluation.json is not readable JSON" in note for note in data["notes"])
    assert "run: 2 unreadable lines in train-00000000.jsonl" in data["notes"]
    assert len(data["trajectories"]) == 20


@pytest.mark.parametrize("content", ["", "step,a\n", "step,a\n\x00,\xff\n", "step,a\n1," + "x" * 200_000])
def test_a_metrics_file_without_rows_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(content.encode("latin-1"))
    notes = data_of(write_report([tmp_path], tmp_path / "report.html"))["notes"]
    assert any("no curves" in note for note in notes)


def test_an_evaluation_row_without_accuracy_is_said(tmp_path: Path) -> None:
    results = {"rows": [{"name": "x", "cells": {"greedy": {"n": 3}}}]}
    data = data_of(write_report([tmp_path], tmp_path / "report.html", results))
    assert data["evaluation"] is None
    assert any("'x', 'greedy': accuracy is None" in note for note in data["notes"])


def test_results_of_several_runs_make_one_table_and_given_ones_go_before(tmp_path: Path) -> None:
    for name, rows in (("sft", ["base", "after SFT"]), ("grpo", ["after SFT", "after GRPO"])):
        (tmp_path / name).mkdir()
        made = [{"name": row, "cells": {"greedy": {"accuracy": 0.5, "stderr": math.nan, "n": 4}}} for row in rows]
        (tmp_path / name / "evaluation.json").write_text(json.dumps({"rows": made, "meta": {name: 1}}))
    runs = [tmp_path / "sft", tmp_path / "grpo"]
    merged = data_of(write_report(runs, tmp_path / "a.html"))["evaluation"]
    assert [row["name"] for row in merged["rows"]] == ["base", "after SFT", "after GRPO"]
    assert merged["rows"][0]["cells"]["greedy"]["stderr"] is None
    assert merged["meta"] == {"sft": "1", "grpo": "1"}
    given = data_of(write_report(runs, tmp_path / "b.html", EVALUATION))["evaluation"]
    assert [row["name"] for row in given["rows"]] == ROWS


@pytest.mark.parametrize(
    ("names", "compare", "expected"),
    [
        (ROWS, None, ["after SFT", "after GRPO"]),
        (ROWS, ["random weights", "SFT continued"], ["random weights", "SFT continued"]),
        (ROWS, ["gone", "after SFT"], ["after SFT", "after GRPO"]),
        (["base", "vanilla", "clamped"], None, ["vanilla", "clamped"]),
        (["base"], None, ["base"]),
    ],
)
def test_which_rows_are_compared(
    tmp_path: Path, names: list[str], compare: list[str] | None, expected: list[str]
) -> None:
    rows = [{"name": name, "cells": {"greedy": {"accuracy": 0.5}}} for name in names]
    path = write_report([tmp_path], tmp_path / "report.html", {"rows": rows, "compare": compare})
    assert data_of(path)["evaluation"]["compare"] == expected


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no evaluation file"):
        write_report([tmp_path], tmp_path / "a.html", tmp_path / "gone.json")
    for no_list in ((), str(tmp_path)):
        with pytest.raises(ConfigurationError, match="list of one or more run directories"):
            write_report(no_list, tmp_path / "a.html")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_sft_run(tmp_path / name / "run") for name in ("a", "b")]
    names = [run["name"] for run in data_of(write_report(runs, tmp_path / "r.html"))["runs"]]
    assert names == [str(path) for path in runs]


def test_a_large_run_stays_within_the_size_and_spans_all_steps(tmp_path: Path) -> None:
    for step in range(0, 200, 10):
        runs = tuple(right_run(task(step, hostile=False), rollout, WORDS) for rollout in range(4))
        group = TrajectoryGroup(task=task(step), trajectories=runs)
        write_trajectories(tmp_path / "trajectories", [group], "train", step)
    path = write_report([tmp_path], tmp_path / "report.html", max_bytes=250_000)
    assert 200_000 < path.stat().st_size <= 250_000
    data = data_of(path)
    assert data["found"] == 80 > len(data["trajectories"])
    steps = sorted({item["step"] for item in data["trajectories"]})
    assert steps[0] == 0 and steps[-1] == 190 and len(steps) >= 5
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 60
    assert all(len([item for item in data["trajectories"] if item["step"] == step]) == 4 for step in steps)


def test_large_pictures_are_embedded_small_and_broken_ones_not_at_all(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((1600, 1200), 80).save(buffer, "PNG")
    item = task(1)
    for number, encoded in enumerate((buffer.getvalue(), b"\x89PNG\r\n broken")):
        run_item = right_run(item, number, WORDS)
        changed = type(item)(id=f"t{number}", question="?", answer="!", images=(encoded,))
        run_item = right_run(changed, number, WORDS)
        write_trajectories(tmp_path, [TrajectoryGroup(task=changed, trajectories=(run_item,))], "train", number)
    selection = select_trajectories({"run": tmp_path}, 1_000_000)
    first, second = selection.trajectories
    large = selection.images[first["images"][0]["file"]]
    assert (large["width"], large["height"]) == (1600, 1200)
    assert large["src"].startswith("data:image/jpeg;base64,") and len(large["src"]) < len(buffer.getvalue()) / 4
    assert second["images"][0]["file"] not in selection.images


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "0123456789abcdef.svg", "0123456789abcdef.png/.."])
def test_only_pictures_of_the_log_are_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "trajectories"
    write_trajectories(
        folder, [TrajectoryGroup(task=task(1), trajectories=(right_run(task(1), 0, WORDS),))], "train", 0
    )
    path = folder / "train-00000000.jsonl"
    record = json.loads(path.read_text())
    Image.new("RGB", (8, 8)).save(folder / "secret.png")
    record["images"] = [{"name": "img_1", "file": name}]
    path.write_text(json.dumps(record) + "\n")
    selection = select_trajectories({"run": folder}, 1_000_000)
    assert len(selection.trajectories) == 1 and selection.images == {}


def test_long_texts_are_cut_with_a_word_about_it(tmp_path: Path) -> None:
    write_trajectories(
        tmp_path, [TrajectoryGroup(task=task(1), trajectories=(right_run(task(1), 0, WORDS),))], "train", 0
    )
    path = tmp_path / "train-00000000.jsonl"
    record = json.loads(path.read_text())
    record["steps"][0]["observation"]["text"] = "a" * 15_000 + "b" * 15_000
    path.write_text(json.dumps(record) + "\n")
    (item,) = select_trajectories({"run": tmp_path}, 1_000_000).trajectories
    text = item["steps"][0]["observation"]["text"]
    assert "[… 10,000 characters left out of this page …]" in text
    assert text.startswith("aaa") and text.endswith("bbb")


def test_metrics_leave_out_empty_cells_and_count_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,a,b\n0,1,\n1,nan,5\n2,inf,x\n3,4,\n")
    metrics = Metrics(path)
    assert (metrics.series["a"].x, metrics.series["a"].y, metrics.series["a"].not_finite) == ((0, 3), (1, 4), 2)
    assert (metrics.series["b"].x, metrics.series["b"].y) == ((1,), (5,))
    path.write_text("x\n1\n")
    with pytest.raises(DataError, match="no column 'step'"):
        Metrics(path)


def test_no_metric_is_hidden(tmp_path: Path) -> None:
    rows = [{"step": 0, "train/accuracy": 1, "train/odd": 2, "val_greedy/odd": 3, "lonely": 4, "tools/t/calls": 1}]
    write_csv(tmp_path / "metrics.csv", rows)
    metrics = Metrics(tmp_path / "metrics.csv")
    known = curve_charts(metrics)
    others = other_charts(metrics, known)
    assert [item.title for item in known] == ["Accuracy"]
    assert [(item.title, [one.label for one in item.series]) for item in others] == [
        ("lonely", ["lonely"]),
        ("odd", ["training", "held-out, greedy"]),
    ]


def test_tool_figures_are_sums_and_medians_and_errors_keep_their_kinds(tmp_path: Path) -> None:
    rows = [
        {"step": s, "tools/a_b/calls": 10, "tools/a_b/errors/timeout": s, "tools/a_b/errors/no_action": 1,
         "tools/a_b/errors/unreachable": 0, "tools/a_b/latency_p50_s": s, "tools/c/calls": 1}
        for s in (1, 2, 6)
    ]  # fmt: skip
    write_csv(tmp_path / "metrics.csv", rows)
    metrics = Metrics(tmp_path / "metrics.csv")
    first, second = tool_figures(metrics)
    assert (first.name, first.calls, first.errors) == ("a_b", 30, {"no_action": 3, "timeout": 9})
    assert (first.latency_p50_s, first.latency_p95_s, second.errors) == (2, None, {})
    charts = tool_charts(metrics)
    assert [item.label for item in chart(charts, "Errors by kind").series] == ["no_action", "timeout"]
    assert chart(charts, "Errors per tool").series[0].y == (2, 3, 7)


def test_a_kind_of_error_that_is_not_logged_at_a_step_counts_as_none_there(tmp_path: Path) -> None:
    rows = [{"step": 0, "tools/a/calls": 5, "tools/a/errors/timeout": 2}, {"step": 1, "tools/a/calls": 5}]
    rows.append({"step": 2, "tools/a/calls": 5, "tools/a/errors/timeout": 3, "tools/a/errors/no_action": 1})
    write_csv(tmp_path / "metrics.csv", rows)
    charts = tool_charts(Metrics(tmp_path / "metrics.csv"))
    assert chart(charts, "Errors per tool").series[0].y == (2, 0, 4)
    assert [item.y for item in chart(charts, "Errors by kind").series] == [(0, 0, 1), (2, 0, 3)]


def test_long_series_are_thinned_to_means(tmp_path: Path) -> None:
    write_csv(tmp_path / "metrics.csv", [{"step": step, "a": step % 2} for step in range(2000)])
    series = thinned(Metrics(tmp_path / "metrics.csv").series["a"], limit=100)
    assert len(series.x) == 100 and series.points_per_mean == 20
    assert set(series.y) == {0.5} and series.x[0] == 9.5


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_writes_into_the_last_run_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_sft_run(tmp_path / "sft"), make_grpo_run(tmp_path / "grpo", steps=20)]
    assert run(command(*map(str, runs))) == 0
    assert (tmp_path / "grpo" / "report.html").is_file()
    assert str(tmp_path / "grpo" / "report.html") in capsys.readouterr().out


def test_the_command_refuses_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run directory"):
        run(command(str(tmp_path / "typo")))
