"""Tables and figures of the ablation, from runs whose figures are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from opensearch_lightning.dashboards.ablation import (
    MEASURES,
    ScoreShares,
    difference,
    fatal_shares,
    means,
    read_runs,
    shares,
)
from opensearch_lightning.dashboards.ablation_page import write_ablation
from opensearch_lightning.errors import DataError
from tests.dashboards.ablation_runs import leave_run

ACCURACY, FATAL = MEASURES[0], MEASURES[5]
SCORES = [(1, -1.0), (1, -0.5), (1, 0.6), (1, 0.0), (0, 1.2), (0, -0.3)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two arms over three seeds, whose level differs by seed; the third seed lacks the reference."""
    for seed, level in ((1, 0.2), (2, 0.6), (3, 0.4)):
        leave_run(tmp_path, seed, "start", accuracy=level, fatal=0.3)
        leave_run(tmp_path, seed, "vanilla", accuracy=level + 0.1, curve=[level] * 3 + [level + 0.1] * 5, scores=SCORES)
    leave_run(tmp_path, 1, "fatal_clamp", accuracy=0.5, fatal=0.1, curve=[0.2] * 8, scores=[(1, -1.0)])
    leave_run(tmp_path, 2, "fatal_clamp", accuracy=0.8, fatal=0.1, curve=[0.6] * 8)
    return tmp_path


def test_means_are_over_the_seeds_of_an_arm(out: Path) -> None:
    runs = read_runs(out)
    assert [(run.seed, run.arm) for run in runs][:3] == [(1, "start"), (1, "vanilla"), (1, "fatal_clamp")]
    start = means(runs, "start", ACCURACY)
    assert start is not None
    assert (round(start.mean, 12), start.n) == (0.4, 3)
    # deviation 0.2, t(2) = 4.303
    assert start.half == pytest.approx(4.303 * 0.2 / 3**0.5)
    assert ACCURACY.shown(start) == "40.0 ± 49.7"
    assert means(runs, "hard_mask", ACCURACY) is None


def test_differences_are_paired_by_seed(out: Path) -> None:
    # 0.3 - 0.5 and 0.7 - 0.8; the third seed has no pair. deviation 0.0707, t(1) = 12.706
    found = difference(read_runs(out), "vanilla", "fatal_clamp", ACCURACY)
    assert found is not None
    assert found.n == 2
    assert found.mean == pytest.approx(-0.15)
    assert found.half == pytest.approx(12.706 * 0.1 / 2**0.5 / 2**0.5)
    assert ACCURACY.shown(found, signed=True) == "-15.0 ± 63.5"
    fatal = difference(read_runs(out), "vanilla", "fatal_clamp", FATAL)
    # both seeds 0.25 - 0.1: an interval without width leaves out zero
    assert FATAL.shown(fatal, signed=True) == "+15.0 ± 0.0*"


def test_the_end_of_training_is_its_last_steps(out: Path) -> None:
    (run,) = (run for run in read_runs(out) if (run.seed, run.arm) == (1, "vanilla"))
    assert run.at_the_end("train/accuracy") == pytest.approx(0.3)
    assert fatal_shares([run])["1"] == {
        "held-out, before training": None,
        "first step": 0.25,
        "all steps": 0.25,
        "last steps": 0.25,
    }


def test_shares_of_scores_leave_out_groups_that_score_nothing() -> None:
    found = ScoreShares.of([-1.0, -0.5, 0.6, 0.0])
    assert (found.n, found.zero) == (4, 1)
    assert found.negative == pytest.approx(2 / 3)
    assert found.positive == pytest.approx(1 / 3)
    assert (found.negative_mean, found.positive_mean) == (-0.75, 0.6)
    assert ScoreShares.of([]) == ScoreShares(n=0, zero=0, negative=0, positive=0, negative_mean=0, positive_mean=0)


def test_fatal_scores_are_told_from_others(out: Path) -> None:
    runs = read_runs(out)
    assert shares(runs, "vanilla")["fatal"].n == 12
    assert shares(runs, "vanilla")["non-fatal"].positive_mean == pytest.approx(1.2)
    assert shares(runs, None)["fatal"].n == 13


def test_everything_is_written(out: Path) -> None:
    text = write_ablation(out)
    assert (out / "ablation.md").read_text(encoding="utf-8") == text
    assert "| accuracy, held-out, sampled (%) | 40.0 ± 49.7 | 50.0 ± 49.7 |  |  | 65.0 ± 190.6 |" in text
    assert "| vanilla, fatal | 12 | 3 | 66.7% | -0.75 | 33.3% | +0.60 |" in text
    data = json.loads((out / "ablation.json").read_text(encoding="utf-8"))
    assert data["seeds"] == [1, 2, 3]
    assert data["minus_fatal_clamp"][ACCURACY.name]["vanilla"]["mean"] == pytest.approx(-0.15)
    assert data["curves"]["train/accuracy"]["vanilla"] == pytest.approx([0.4] * 3 + [0.5] * 5)
    page = (out / "ablation.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "<script" not in page
    assert "69.2% of the fatal" not in page
    assert "70.0% of the fatal rollouts with a score have a negative one (mean -0.79)" in page


def test_figures_show_their_values(out: Path) -> None:
    write_ablation(out)
    root = ElementTree.fromstring((out / "accuracy.svg").read_text(encoding="utf-8"))
    lines = [
        [tuple(map(float, point.split(","))) for point in node.attrib["points"].split()]
        for node in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert [len(line) for line in lines] == [8, 8]
    vanilla = [y for _, y in lines[0]]
    assert vanilla[0] == vanilla[2] > vanilla[3] == vanilla[7], "accuracy rises at the fourth step, and SVG counts down"
    text = (out / "scores.svg").read_text(encoding="utf-8")
    assert "fatal (10)" in text
    assert "non-fatal (6)" in text
    assert re.search(r"<style>.*prefers-color-scheme", text, re.DOTALL)


def test_nothing_finished(tmp_path: Path) -> None:
    leave_run(tmp_path, 1, "start")
    with pytest.raises(DataError, match=r"holds no finished arm; run `opensearch ablation --out"):
        write_ablation(tmp_path)


def test_a_broken_run_is_named(out: Path) -> None:
    (out / "seed_2" / "vanilla" / "result.json").write_text("{}")
    with pytest.raises(DataError, match=r"seed_2/vanilla cannot be read .*'seed'.*remove it and run it again"):
        read_runs(out)
