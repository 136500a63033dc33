"""From ``metrics.csv`` to the charts and tool figures of the report."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from opensearch_lightning.errors import DataError
from opensearch_lightning.types import ErrorKind

Unit = Literal["fraction", "count", "seconds", "number"]

MAX_POINTS = 800
"""Points of one series on the page; longer ones are drawn as means over equal spans."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one metric; ``not_finite`` counts the values left out because they are NaN or infinite."""

    metric: str
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    not_finite: int = 0
    points_per_mean: int = 1


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series of one unit that belong together; ``note`` says what a reader should know about them.

    ``log`` asks for a logarithmic axis of values, for series of different sizes.
    """

    title: str
    unit: Unit
    series: tuple[Series, ...]
    note: str = ""
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolFigures:
    """One tool over a whole run: sums over the logged steps, latencies in seconds as medians over them."""

    name: str
    calls: int
    errors: dict[str, int]
    cache_hits: int
    latency_p50_s: float | None
    latency_p95_s: float | None


class Metrics:
    """The columns of one ``metrics.csv``.

    Args:
        path: a file that :class:`~opensearch_lightning.dashboards.metrics_csv.MetricsCSV` wrote, or another CSV with a
            column ``step``. Cells that are empty or not numbers are no points.

    Raises:
        DataError: when it is no CSV or has no column ``step``.
    """

    def __init__(self, path: Path) -> None:
        self.series: dict[str, Series] = {}
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        not_finite: dict[str, int] = defaultdict(int)
        for row in _rows(path):
            step = _number(row["step"])
            if step is None or not math.isfinite(step):
                continue
            for name, cell in row.items():
                value = _number(cell) if isinstance(name, str) else None
                if value is None:
                    continue
                if math.isfinite(value):
                    points[name].append((step, value))
                else:
                    not_finite[name] += 1
        self.steps = tuple(step for step, _ in points.pop("step", []))
        for name in points.keys() | not_finite.keys():
            x, y = zip(*points[name], strict=True) if points[name] else ((), ())
            self.series[name] = Series(metric=name, label=name, x=x, y=y, not_finite=not_finite[name])

    def total(self, name: str) -> float:
        """Sum of a metric over the logged steps; 0 when it is not there."""
        return sum(self.series[name].y) if name in self.series else 0.0

    def median(self, name: str) -> float | None:
        """Median of a metric over the logged steps."""
        return statistics.median(self.series[name].y) if name in self.series and self.series[name].y else None


@dataclass(frozen=True, kw_only=True)
class _Spec:
    title: str
    unit: Unit
    metrics: dict[str, str]
    """Label by metric name; one ``*`` stands for any part of a name and fills the ``*`` of the label."""
    note: str = ""


_TRAIN, _GREEDY, _SAMPLED = "training", "held-out, greedy", "held-out, sampled"
_PREFIXES = {"train": _TRAIN, "val_greedy": _GREEDY, "val_sampled": _SAMPLED, "val": "held-out"}


def _splits(metric: str) -> dict[str, str]:
    return {f"{prefix}/{metric}": label for prefix, label in _PREFIXES.items()}


_CHARTS = (
    _Spec(title="Accuracy", unit="fraction", metrics=_splits("accuracy"), note="Share of answers judged right."),
    _Spec(
        title="Turns",
        unit="count",
        metrics={**_splits("turns"), "train/tool_calls": "training, tool calls"},
        note="Mean per trajectory; a turn is one action of the policy.",
    ),
    _Spec(
        title="Reward parts",
        unit="number",
        metrics={
            "train/reward": "total",
            "train/reward_format": "format",
            "train/reward_accuracy": "accuracy",
            "train/reward_query": "query quality",
        },
        note="Training. total = format × [α · accuracy + (1 − α) · query]",
    ),
    _Spec(
        title="Fatal and clamped trajectories",
        unit="fraction",
        metrics={
            **{name: f"fatal, {label}" for name, label in _splits("fatal_fraction").items()},
            "train/clamped_fraction": "clamped, training",
        },
        note="Clamped: fatal, with a negative advantage that was set to 0.",
    ),
    _Spec(
        title="Bias of the clamp",
        unit="number",
        metrics={"train/clamp_bias": "bias"},
        note="Mean advantage that the clamp adds to a group.",
    ),
    _Spec(
        title="Advantage before the clamp",
        unit="number",
        metrics={"train/advantage_fatal": "fatal", "train/advantage_non_fatal": "not fatal"},
        note="Mean over the trajectories of a step.",
    ),
    _Spec(
        title="Rollouts without signal",
        unit="fraction",
        metrics={
            "train/equal_reward_fraction": "groups of equal rewards",
            "train/invalid_fraction": "trajectories without a score",
        },
    ),
    _Spec(title="How training rollouts ended", unit="fraction", metrics={"train/stop/*": "*", "stop/*": "*"}),
    _Spec(title="Loss", unit="number", metrics=_splits("loss")),
    _Spec(
        title="Token accuracy",
        unit="fraction",
        metrics=_splits("token_accuracy"),
        note="Share of the policy's tokens ranked first.",
    ),
    _Spec(title="Sampled tokens", unit="count", metrics=_splits("sampled_tokens"), note="Mean per trajectory."),
    _Spec(title="Time per step", unit="seconds", metrics={"time/*_s": "*"}),
    _Spec(title="Learning rate", unit="number", metrics={"train/lr": "learning rate"}),
    _Spec(title="Gradient norm", unit="number", metrics={"train/grad_norm": "before clipping"}),
    _Spec(title="Clipped tokens", unit="fraction", metrics={"train/clip_fraction": "of the trained tokens"}),
    _Spec(
        title="Largest ratio error",
        unit="number",
        metrics={"train/ratio_max_error": "|ratio − 1|"},
        note="Between the engine that sampled and the trained policy.",
    ),
)

_LOG = "Logarithmic axis."
_TOOL = re.compile(r"tools/(?P<tool>.+?)/(?P<figure>calls|cache_hits|latency_p50_s|latency_p95_s|errors/(?P<kind>.+))")


def curve_charts(metrics: Metrics) -> list[Chart]:
    """The well-known charts that have points."""
    charts = []
    for spec in _CHARTS:
        series = [
            replace(metrics.series[name], label=label)
            for pattern, label in spec.metrics.items()
            for name, label in _matching(pattern, label, metrics.series)
        ]
        charts.append(Chart(title=spec.title, unit=spec.unit, series=tuple(series), note=spec.note))
    return _not_empty(charts)


def other_charts(metrics: Metrics, known: Sequence[Chart]) -> list[Chart]:
    """What neither ``known`` nor the tools' charts show, so that nothing logged is hidden.

    A metric of several splits (``train/x``, ``val_greedy/x``) makes one chart.
    """
    used = {item.metric for chart in known for item in chart.series} | {"epoch"}
    series: dict[str, list[Series]] = defaultdict(list)
    for name in sorted(metrics.series):
        if name not in used and not _TOOL.fullmatch(name):
            prefix, _, rest = name.partition("/")
            title, label = (rest, _PREFIXES[prefix]) if prefix in _PREFIXES else (name, name)
            series[title].append(replace(metrics.series[name], label=label))
    charts = []
    for title, items in series.items():
        unit: Unit = "seconds" if title.endswith("_s") else "number"
        if title.endswith("_fraction") or title.startswith("stop/"):
            unit = "fraction"
        charts.append(Chart(title=title.replace("_", " "), unit=unit, series=tuple(items)))
    return _not_empty(charts)


def tool_charts(metrics: Metrics) -> list[Chart]:
    """Calls, errors and latencies of the tools over the steps."""
    tools = dict(sorted(_tool_metrics(metrics).items()))
    calls = [names["calls"] for names in tools.values() if "calls" in names]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for names in tools.values():
        for figure, name in _errors(names).items():
            if metrics.total(name):
                by_kind[figure].append(name)

    def of_tools(figure: str) -> tuple[Series, ...]:
        return tuple(
            replace(metrics.series[names[figure]], label=tool) for tool, names in tools.items() if figure in names
        )

    errors = tuple(
        _sum_of(metrics, list(_errors(names).values()), [names[key] for key in names if key == "calls"], tool)
        for tool, names in tools.items()
    )
    kinds = tuple(
        _sum_of(metrics, by_kind[figure], calls, figure[len("errors/") :]) for figure in sorted(by_kind, key=_rank)
    )
    step = "Per logged training step"
    charts = [
        Chart(title="Calls per tool", unit="count", series=of_tools("calls"), note=f"{step}."),
        Chart(title="Errors per tool", unit="count", series=errors, note=f"{step}, all kinds."),
        Chart(title="Errors by kind", unit="count", series=kinds, note=f"{step}, all tools."),
        Chart(title="Latency, median", unit="seconds", series=of_tools("latency_p50_s"), note=_LOG, log=True),
        Chart(title="Latency, 95th percentile", unit="seconds", series=of_tools("latency_p95_s"), note=_LOG, log=True),
    ]
    return _not_empty(charts)


def tool_figures(metrics: Metrics) -> list[ToolFigures]:
    """Each tool over the whole run, by name."""
    figures = []
    for tool, names in sorted(_tool_metrics(metrics).items()):
        errors = {figure[len("errors/") :]: round(metrics.total(name)) for figure, name in _errors(names).items()}
        figures.append(
            ToolFigures(
                name=tool,
                calls=round(metrics.total(names.get("calls", ""))),
                errors={kind: count for kind, count in errors.items() if count},
                cache_hits=round(metrics.total(names.get("cache_hits", ""))),
                latency_p50_s=metrics.median(names.get("latency_p50_s", "")),
                latency_p95_s=metrics.median(names.get("latency_p95_s", "")),
            )
        )
    return figures


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """``series`` with at most ``limit`` points, each the mean of as many neighbours."""
    width = math.ceil(len(series.x) / limit)
    if width <= 1:
        return series
    spans = [slice(start, start + width) for start in range(0, len(series.x), width)]
    return replace(
        series,
        x=tuple(statistics.fmean(series.x[span]) for span in spans),
        y=tuple(statistics.fmean(series.y[span]) for span in spans),
        points_per_mean=width,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            columns = list(reader.fieldnames or ())
            if "step" not in columns:
                raise DataError(f"{path} has no column 'step'; its columns are {columns}.")
            return list(reader)
        except csv.Error as error:
            raise DataError(f"{path} cannot be read as CSV: {error}.") from error


def _number(cell: object) -> float | None:
    if not isinstance(cell, str) or not cell.strip():
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def _not_empty(charts: Iterable[Chart]) -> list[Chart]:
    return [chart for chart in charts if any(item.x or item.not_finite for item in chart.series)]


def _matching(pattern: str, label: str, names: Iterable[str]) -> list[tuple[str, str]]:
    start, star, end = pattern.partition("*")
    if not star:
        return [(pattern, label)] if pattern in names else []
    return [
        (name, label.replace("*", name[len(start) : len(name) - len(end)].replace("_", " ")))
        for name in sorted(names)
        if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
    ]


def _tool_metrics(metrics: Metrics) -> dict[str, dict[str, str]]:
    """Metric name by tool and figure (``"calls"``, ``"errors/timeout"``, …)."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in metrics.series:
        match = _TOOL.fullmatch(name)
        if match:
            found[match["tool"]][match["figure"]] = name
    return found


def _errors(names: Mapping[str, str]) -> dict[str, str]:
    """Metric name by ``"errors/<kind>"``, in the order of the kinds."""
    return {figure: names[figure] for figure in sorted(names, key=_rank) if figure.startswith("errors/")}


def _rank(figure: str) -> tuple[int, str]:
    """Order of error kinds: as in the closed list, unknown ones last."""
    kinds = [f"errors/{kind.value}" for kind in ErrorKind]
    return (kinds.index(figure) if figure in kinds else len(kinds), figure)


def _sum_of(metrics: Metrics, names: Sequence[str], calls: Sequence[str], label: str) -> Series:
    """Sum of counts that are logged only where they are not 0; they are 0 where one of ``calls`` is logged alone."""
    sums = {x: 0.0 for name in calls for x in metrics.series[name].x}
    for name in names:
        for x, y in zip(metrics.series[name].x, metrics.series[name].y, strict=True):
            sums[x] = sums.get(x, 0.0) + y
    steps = sorted(sums)
    return Series(metric=" + ".join(names), label=label, x=tuple(steps), y=tuple(sums[step] for step in steps))
