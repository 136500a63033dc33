"""The ablation's figures (Table 3b and those beside it in the paper), from the folders of its runs."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.dashboards.curves import Metrics
from opensearch_lightning.dashboards.intervals import Interval, interval_95
from opensearch_lightning.errors import DataError, one_line

ARMS = {
    "vanilla": "vanilla",
    "hard_mask": "hard mask",
    "fatal_mask": "fatal mask",
    "fatal_clamp": "fatal mask + clamp",
}
"""Name of an arm in ``conf/experiment/ablation``, and in the table."""

START = "start"
"""Name of the policy that the arms of a seed start from."""

LAST_STEPS = 5
"""Training steps at the end that a figure of training is a mean over."""

REFERENCE = "fatal_clamp"
"""The arm that the others are set against."""

CURVES = ("train/tool_calls", "train/accuracy", "train/fatal_fraction")
"""Metrics of training that are compared step by step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one arm of one seed left: held-out figures, curves by metric, and scores before the clamp.

    ``curves`` hold the value of each step in order, ``scores`` pairs of whether fatal and group advantage.
    """

    seed: int
    arm: str
    held_out: Mapping[str, Mapping[str, float]]
    curves: Mapping[str, tuple[float, ...]]
    scores: tuple[tuple[bool, float], ...]

    def at_the_end(self, metric: str) -> float:
        """Mean over the last steps of training; not a number where there was none."""
        values = self.curves.get(metric, ())[-LAST_STEPS:]
        return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A row of figures: its name, whether it is in percent, and where it is read."""

    name: str
    percent: bool
    read: Callable[[Run], float]

    def shown(self, value: Interval | None, *, signed: bool = False) -> str:
        """``"61.5 ± 3.4"``, in points where the measure is in percent."""
        if value is None:
            return ""
        scale, digits = (100, 1) if self.percent else (1, 2)
        mean = f"{scale * value.mean:{'+' if signed else ''}.{digits}f}"
        half = "" if value.half is None else f" ± {scale * value.half:.{digits}f}"
        return mean + half + ("*" if signed and value.excludes_zero else "")


def _held_out(decoding: str, figure: str) -> Callable[[Run], float]:
    return lambda run: float(run.held_out[decoding][figure])


def _trained(metric: str) -> Callable[[Run], float]:
    return lambda run: run.at_the_end(metric)


MEASURES = (
    Measure(name="accuracy, held-out, sampled (%)", percent=True, read=_held_out("sampled", "accuracy")),
    Measure(name="accuracy, held-out, greedy (%)", percent=True, read=_held_out("greedy", "accuracy")),
    Measure(name="accuracy, end of training (%)", percent=True, read=_trained("train/accuracy")),
    Measure(name="tool turns, held-out, sampled", percent=False, read=_held_out("sampled", "tool_calls")),
    Measure(name="tool turns, end of training", percent=False, read=_trained("train/tool_calls")),
    Measure(name="fatal share, held-out, sampled (%)", percent=True, read=_held_out("sampled", "fatal_fraction")),
    Measure(name="fatal share, end of training (%)", percent=True, read=_trained("train/fatal_fraction")),
    Measure(name="reward, held-out, sampled", percent=False, read=_held_out("sampled", "reward")),
)


@dataclass(frozen=True, kw_only=True)
class ScoreShares:
    """Scores of one kind of trajectory before the clamp: counts, shares of those with a score, means.

    A group of equal rewards scores nothing: its trajectories are in ``zero`` and in no share.
    """

    n: int
    zero: int
    negative: float
    positive: float
    negative_mean: float
    positive_mean: float

    @classmethod
    def of(cls, scores: Sequence[float]) -> ScoreShares:
        """Figures of ``scores``; 0 where there is nothing to count."""
        below, above = [s for s in scores if s < 0], [s for s in scores if s > 0]
        scored = max(1, len(below) + len(above))
        return cls(
            n=len(scores),
            zero=len(scores) - len(below) - len(above),
            negative=len(below) / scored,
            positive=len(above) / scored,
            negative_mean=statistics.fmean(below) if below else 0.0,
            positive_mean=statistics.fmean(above) if above else 0.0,
        )


def read_runs(out: Path) -> list[Run]:
    """The finished arms in ``out``, by seed and in the order of :data:`ARMS`, each seed's start first.

    Raises:
        DataError: a file of a run cannot be read.
    """
    order = [START, *ARMS]
    found = [_run(path.parent) for path in sorted(out.glob("seed_*/*/result.json"))]
    return sorted((run for run in found if run.arm in order), key=lambda run: (run.seed, order.index(run.arm)))


def means(runs: Sequence[Run], arm: str, measure: Measure) -> Interval | None:
    """Mean of a measure over the seeds of an arm; ``None`` where it has none."""
    values = [value for run in runs if run.arm == arm and not math.isnan(value := measure.read(run))]
    return interval_95(values) if values else None


def difference(runs: Sequence[Run], arm: str, reference: str, measure: Measure) -> Interval | None:
    """Mean of ``arm - reference`` over the seeds that have both."""
    by_arm = {(run.seed, run.arm): measure.read(run) for run in runs}
    seeds = sorted({run.seed for run in runs})
    pairs = [(by_arm.get((seed, arm), math.nan), by_arm.get((seed, reference), math.nan)) for seed in seeds]
    values = [one - other for one, other in pairs if not math.isnan(one - other)]
    return interval_95(values) if values else None


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """All figures as plain data."""
    arms = [START, *ARMS]
    return {
        "seeds": sorted({run.seed for run in runs}),
        "means": {m.name: {arm: _plain(means(runs, arm, m)) for arm in arms} for m in MEASURES},
        "minus_fatal_clamp": {
            m.name: {arm: _plain(difference(runs, arm, REFERENCE, m)) for arm in ARMS if arm != REFERENCE}
            for m in MEASURES
        },
        "scores": {
            arm or "all arms": {kind: asdict(value) for kind, value in shares(runs, arm).items()}
            for arm in (*ARMS, None)
        },
        "fatal_share": fatal_shares(runs),
        "curves": {
            metric: {arm: mean_curve(runs, arm, metric) for arm in ARMS if curves_of(runs, arm, metric)}
            for metric in CURVES
        },
        "each": [{"seed": r.seed, "arm": r.arm, **{m.name: _finite(m.read(r)) for m in MEASURES}} for r in runs],
    }


def shares(runs: Sequence[Run], arm: str | None) -> dict[str, ScoreShares]:
    """Scores of fatal and of other trajectories in an arm's training; ``None``: in all of them."""
    chosen = [score for run in runs if arm in (None, run.arm) for score in run.scores]
    return {
        kind: ScoreShares.of([score for fatal, score in chosen if fatal is is_fatal])
        for kind, is_fatal in (("fatal", True), ("non-fatal", False))
    }


def fatal_shares(runs: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """Fatal share of the rollouts at the first training step, over all steps and over the last, for each seed.

    The arms of a seed share their first step; the others are means over them.
    """
    rows: dict[str, dict[str, float | None]] = {}
    for seed in sorted({run.seed for run in runs}):
        of_arms = (curves_of(runs, arm, "train/fatal_fraction") for arm in ARMS)
        curves = [by_seed[seed] for by_seed in of_arms if seed in by_seed]
        start = [run.held_out["sampled"]["fatal_fraction"] for run in runs if run.seed == seed and run.arm == START]
        rows[str(seed)] = {
            "held-out, before training": start[0] if start else None,
            "first step": statistics.fmean(curve[0] for curve in curves) if curves else None,
            "all steps": statistics.fmean(statistics.fmean(curve) for curve in curves) if curves else None,
            "last steps": statistics.fmean(statistics.fmean(curve[-LAST_STEPS:]) for curve in curves)
            if curves
            else None,
        }
    return rows


def curves_of(runs: Sequence[Run], arm: str, metric: str) -> dict[int, tuple[float, ...]]:
    """A metric's value at each step, by seed."""
    return {run.seed: run.curves[metric] for run in runs if run.arm == arm and metric in run.curves}


def mean_curve(runs: Sequence[Run], arm: str, metric: str) -> list[float]:
    """Mean of a metric over the seeds, at each step that all of them have."""
    return [statistics.fmean(values) for values in zip(*curves_of(runs, arm, metric).values(), strict=False)]


def _run(folder: Path) -> Run:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        curves = Metrics(folder / "metrics.csv").series if (folder / "metrics.csv").exists() else {}
        return Run(
            seed=int(result["seed"]),
            arm=str(result["arm"]),
            held_out=result["evaluation"],
            curves={name: series.y for name, series in curves.items()},
            scores=tuple(_scores(folder / "advantages.csv")),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the run in {folder} cannot be read ({one_line(repr(error))}); remove it and run it again"
        ) from error


def _scores(path: Path) -> list[tuple[bool, float]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return [(row["fatal"] == "1", float(row["raw"])) for row in csv.DictReader(lines)]


def _plain(value: Interval | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
