"""The ablation's tables and figures as Markdown, as SVG files and as one page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from opensearch_lightning.dashboards.ablation import (
    ARMS,
    LAST_STEPS,
    MEASURES,
    REFERENCE,
    START,
    Run,
    curves_of,
    difference,
    fatal_shares,
    mean_curve,
    means,
    read_runs,
    shares,
    summary,
)
from opensearch_lightning.dashboards.figures import STYLE, Bars, Line, as_file, histogram_figure, line_figure
from opensearch_lightning.errors import DataError

_EDGES = tuple(-2.6 + 0.2 * number for number in range(27))

_TITLES = {
    "turns": ("Tool turns a rollout", "train/tool_calls", False),
    "accuracy": ("Accuracy of the batch", "train/accuracy", True),
    "fatal": ("Fatal share of the batch", "train/fatal_fraction", True),
}
"""Name of a figure's file: its title, its metric, whether it is in percent."""


def write_ablation(out: Path) -> str:
    """Write ``ablation.md``, ``ablation.json``, ``ablation.html`` and the figures into ``out``; returns the Markdown.

    Args:
        out: folder of ``opensearch ablation``, with ``seed_<n>/<arm>`` in it; arms without ``result.json`` are not
            finished and left out.

    Raises:
        DataError: no arm is finished, or a file cannot be read.
    """
    runs = read_runs(out)
    if not any(run.arm in ARMS for run in runs):
        raise DataError(f"{out} holds no finished arm; run `opensearch ablation --out {out}` first")
    figures = {name: _curve_figure(runs, *spec) for name, spec in _TITLES.items() if _has_curves(runs, spec[1])}
    if any(run.scores for run in runs):
        figures["scores"] = _score_figure(runs)
    text = markdown(runs)
    _write(out / "ablation.json", json.dumps(summary(runs), indent=1) + "\n")
    _write(out / "ablation.md", text)
    _write(out / "ablation.html", _page(runs, figures))
    for name, figure in figures.items():
        _write(out / f"{name}.svg", as_file(figure))
    return text


def markdown(runs: Sequence[Run]) -> str:
    """The tables, as Markdown."""
    seeds = sorted({run.seed for run in runs if run.arm in ARMS})
    parts = [
        f"Mean over {len(seeds)} seeds ± 95% interval (Student's t).",
        _markdown_table(*_means_table(runs)),
        f"Difference to {ARMS[REFERENCE]}, paired by seed; * where the interval leaves out zero.",
        _markdown_table(*_differences_table(runs)),
        "Scores (group advantages) of training rollouts before the clamp; shares of those that are not zero.",
        _markdown_table(*_scores_table(runs)),
        f"Fatal share of rollouts (%) of each seed; training: means over the arms, the last {LAST_STEPS} steps.",
        _markdown_table(*_fatal_table(runs)),
    ]
    return "\n\n".join(parts) + "\n"


def _means_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    arms = {START: "before", **ARMS}
    return ["", *arms.values()], [[m.name, *(m.shown(means(runs, arm, m)) for arm in arms)] for m in MEASURES]


def _differences_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    arms = {arm: label for arm, label in ARMS.items() if arm != REFERENCE}
    rows = [[m.name, *(m.shown(difference(runs, arm, REFERENCE, m), signed=True) for arm in arms)] for m in MEASURES]
    return ["", *arms.values()], rows


def _scores_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    head = ["", "rollouts", "zero", "negative", "mean", "positive", "mean"]
    rows = []
    arms: list[tuple[str | None, str]] = [*ARMS.items(), (None, "all arms")]
    for arm, label in arms:
        for kind, s in shares(runs, arm).items():
            parts = [
                f"{100 * s.negative:.1f}%",
                f"{s.negative_mean:.2f}",
                f"{100 * s.positive:.1f}%",
                f"+{s.positive_mean:.2f}",
            ]
            rows.append([f"{label}, {kind}", str(s.n), str(s.zero), *parts])
    return head, rows


def _fatal_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    by_seed = fatal_shares(runs)
    head = ["seed", *next(iter(by_seed.values()))]
    rows = [[seed, *_percents(row.values())] for seed, row in by_seed.items()]
    columns = zip(*(row.values() for row in by_seed.values()), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    rows.append(["mean", *_percents(statistics.fmean(values) if values else None for values in known)])
    return head, rows


def _percents(values: Iterable[float | None]) -> list[str]:
    return ["" if value is None else f"{100 * value:.1f}" for value in values]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _has_curves(runs: Sequence[Run], metric: str) -> bool:
    return any(curves_of(runs, arm, metric) for arm in ARMS)


def _curve_figure(runs: Sequence[Run], title: str, metric: str, percent: bool) -> str:
    """Mean over the seeds, in a band of one standard error of what sets an arm apart within its seed.

    Seeds differ in level far more than arms do: each value is taken against the mean of its seed's arms at the step.
    """
    by_arm = {arm: curves_of(runs, arm, metric) for arm in ARMS}
    lines = []
    for arm, curves in by_arm.items():
        if not curves:
            continue
        mean = mean_curve(runs, arm, metric)
        errors = [_error_within(by_arm, arm, step) for step in range(len(mean))]
        lines.append(
            Line(
                label=ARMS[arm],
                x=range(1, len(mean) + 1),
                y=mean,
                low=[value - error for value, error in zip(mean, errors, strict=True)],
                high=[value + error for value, error in zip(mean, errors, strict=True)],
            )
        )
    return line_figure(title, lines, x_label="training step", percent=percent)


def _error_within(by_arm: Mapping[str, Mapping[int, Sequence[float]]], arm: str, step: int) -> float:
    deviations = []
    for seed, curve in by_arm[arm].items():
        beside = [curves[seed][step] for curves in by_arm.values() if seed in curves and len(curves[seed]) > step]
        deviations.append(curve[step] - statistics.fmean(beside))
    return statistics.stdev(deviations) / math.sqrt(len(deviations)) if len(deviations) > 1 else 0.0


def _score_figure(runs: Sequence[Run]) -> str:
    scores = [score for run in runs for score in run.scores if score[1] != 0]
    bars = []
    for label, is_fatal in (("fatal", True), ("non-fatal", False)):
        values = [score for fatal, score in scores if fatal is is_fatal]
        bars.append(Bars(label=f"{label} ({len(values):,})", heights=_histogram(values)))
    return histogram_figure("Scores before the clamp", _EDGES, bars, x_label="group advantage before the clamp")


def _histogram(values: Sequence[float]) -> list[float]:
    """Share of the values in each bin; what lies outside is in the outermost."""
    counts = [0] * (len(_EDGES) - 1)
    for value in values:
        counts[min(len(counts) - 1, max(0, math.floor((value - _EDGES[0]) / (_EDGES[1] - _EDGES[0]))))] += 1
    return [count / max(1, len(values)) for count in counts]


_PAGE_STYLE = (
    "main > section { display: grid; gap: .75rem; } .pair { display: grid; gap: 1rem; grid-template-columns: "
    "repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); } figure { margin: 0; } td { white-space: nowrap; }"
)


def _page(runs: Sequence[Run], figures: Mapping[str, str]) -> str:
    seeds = sorted({run.seed for run in runs if run.arm in ARMS})
    shown = ", ".join(map(str, seeds))
    curves = [_figure(_TITLES[name][0], figures[name]) for name in _TITLES if name in figures]
    fatal = shares(runs, None)["fatal"]
    said = (
        f"{100 * fatal.negative:.1f}% of the fatal rollouts with a score have a negative one (mean "
        f"{fatal.negative_mean:.2f}), which the clamp sets to zero; {100 * fatal.positive:.1f}% a positive one (mean "
        f"+{fatal.positive_mean:.2f}), which it keeps. Of {fatal.n:,} fatal rollouts {fatal.zero:,} are of groups of "
        "equal rewards; they score zero and are left out. All arms together."
    )
    sections = [
        _section("Results", f"Mean over seeds {shown} ± 95% interval by Student's t.", _table(*_means_table(runs))),
        _section(
            f"Difference to {ARMS[REFERENCE]}",
            "Paired by seed: same start, tasks, sampling noise and faults. * where the 95% interval leaves out zero.",
            _table(*_differences_table(runs)),
        ),
        _section(
            "Over the training",
            "Mean over the seeds; band: ± one standard error of an arm's distance from the mean of its seed's arms.",
            f'<div class="pair">{"".join(curves)}</div>',
        ),
        _section("Scores before the clamp", said, figures.get("scores", "") + _table(*_scores_table(runs))),
        _section(
            "Fatal share (%)", "Of each seed; training steps are means over its arms.", _table(*_fatal_table(runs))
        ),
    ]
    style = (files("opensearch_lightning.dashboards") / "assets" / "style.css").read_text(encoding="utf-8")
    style += STYLE + _PAGE_STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Ablation</title>'
        f'<style>{style}</style></head><body><header id="top"><h1>Ablation of fatal-aware GRPO</h1></header>'
        f"<main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, note: str, content: str) -> str:
    return f'<section><h2>{html.escape(title)}</h2><p class="muted">{html.escape(note)}</p>{content}</section>'


def _figure(title: str, figure: str) -> str:
    return f'<figure class="card"><h3>{html.escape(title)}</h3>{figure}</figure>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="card scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
