"""One HTML page about one or several runs: results, curves, tools, trajectories. It needs no network and no server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from opensearch_lightning.dashboards.browse import select_trajectories
from opensearch_lightning.dashboards.curves import (
    Chart,
    Metrics,
    curve_charts,
    other_charts,
    thinned,
    tool_charts,
    tool_figures,
)
from opensearch_lightning.dashboards.page_json import page_json
from opensearch_lightning.errors import ConfigurationError, DataError, one_line

MAX_BYTES = 7_000_000
"""Default size limit of a page."""

_SCRIPTS = ("dom.js", "charts.js", "results.js", "tools.js", "trajectories.js", "main.js")


def write_report(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    evaluation: str | Path | Mapping[str, Any] | None = None,
    *,
    title: str = "Training report",
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Writes a self-contained page about ``run_dirs`` to ``out`` and returns its path.

    Of each run directory it reads ``metrics.csv``, ``trajectories/`` and ``evaluation.json``. What is missing or cannot
    be read is named on the page; the rest is shown. Every text from outside (tasks, pages, the model, names) reaches
    the page as JSON data that the page's own script puts into text nodes, and the page's content policy allows that
    one script, that one style sheet and embedded pictures only.

    Args:
        run_dirs: run directories in the order to show them, for example an SFT run and the GRPO run after it.
        out: the HTML file; its folder is made. It is replaced at once.
        evaluation: held-out results, as a file or read already; by default the rows of every run's own file. A row is
            ``{"name": …, "cells": {"greedy" | "sampled" | "greedy_faults" | "sampled_faults": {"accuracy", "stderr",
            "n", "fatal_fraction"}}}``. Beside the rows, ``"compare": [before, after]`` names the two that are set
            against each other; by default the last two of the first row and those named "after …", else of all.
        title: heading of the page.
        max_bytes: size limit; trajectories fill what the rest leaves.

    Raises:
        ConfigurationError: without run directories, or with an ``evaluation`` file that is not there or not readable.
    """
    directories = _named(run_dirs)
    notes = [f"{name}: there is no directory {path}" for name, path in directories.items() if not path.is_dir()]
    directories = {name: path for name, path in directories.items() if path.is_dir()}
    runs = [_run(name, path, notes) for name, path in directories.items()]
    data: dict[str, Any] = {
        "title": title,
        "generated": datetime.now().astimezone().isoformat(timespec="minutes"),
        "evaluation": _evaluation(directories, evaluation, notes),
        "runs": runs,
    }
    frame = _page(title, {**data, "notes": notes, "trajectories": [], "images": {}, "found": 0})
    selection = select_trajectories(
        {name: path / "trajectories" for name, path in directories.items()}, max(0, max_bytes - len(frame))
    )
    data |= {
        "notes": notes + selection.notes,
        "trajectories": selection.trajectories,
        "images": selection.images,
        "found": selection.found,
    }
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(_page(title, data), encoding="utf-8")
    scratch.replace(path)
    return path


def _named(run_dirs: Sequence[str | Path]) -> dict[str, Path]:
    """Run directories by a short name that tells them apart."""
    if isinstance(run_dirs, str | Path) or not run_dirs:
        raise ConfigurationError(f"A report needs a list of one or more run directories; got {run_dirs!r}.")
    paths = [Path(run_dir) for run_dir in run_dirs]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, paths, strict=True))


def _run(name: str, directory: Path, notes: list[str]) -> dict[str, Any]:
    """Charts and tool figures of one run; what its metrics lack goes into ``notes``."""
    run: dict[str, Any] = {"name": name, "steps": None, "charts": [], "otherCharts": [], "tools": [], "toolCharts": []}
    path = directory / "metrics.csv"
    if not path.is_file():
        notes.append(f"{name}: no curves, there is no {path}")
        return run
    try:
        metrics = Metrics(path)
    except DataError as error:
        notes.append(f"{name}: no curves. {error}")
        return run
    if not metrics.steps:
        notes.append(f"{name}: no curves, {path} has no rows yet")
        return run
    run["steps"] = [metrics.steps[0], metrics.steps[-1]]
    known = curve_charts(metrics)
    run["charts"] = [_chart(chart) for chart in known]
    run["otherCharts"] = [_chart(chart) for chart in other_charts(metrics, known)]
    run["tools"] = [_finite(asdict(figures)) for figures in tool_figures(metrics)]
    run["toolCharts"] = [_chart(chart) for chart in tool_charts(metrics)]
    return run


def _chart(chart: Chart) -> dict[str, Any]:
    series = [asdict(thinned(item)) for item in chart.series]
    for item in series:
        item["x"] = [_short(value, 12) for value in item["x"]]
        item["y"] = [_short(value, 6) for value in item["y"]]
    return {"title": chart.title, "unit": chart.unit, "note": chart.note, "log": chart.log, "series": series}


def _short(value: float, digits: int) -> float:
    """``value`` with so many significant digits, to keep the page small."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _evaluation(
    directories: Mapping[str, Path], evaluation: str | Path | Mapping[str, Any] | None, notes: list[str]
) -> dict[str, Any] | None:
    """Held-out results; rows of the same name: the later run's stays."""
    if isinstance(evaluation, Mapping):
        sources: list[Any] = [evaluation]
    elif evaluation is None:
        paths = [path / "evaluation.json" for path in directories.values()]
        sources = [_json(path, notes) for path in paths if path.is_file()]
    elif Path(evaluation).is_file():
        sources = [_given(Path(evaluation))]
    else:
        raise ConfigurationError(f"There is no evaluation file {evaluation}; leave it out, or write it first.")
    rows: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    compare: Any = None
    for source in sources:
        try:
            rows |= {str(row["name"]): _row(row) for row in source["rows"]}
            meta |= source.get("meta") or {}
            compare = source.get("compare") or compare
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(f"Held-out results: not of the expected form ({error!r})")
    if not rows:
        notes.append("No held-out results: there is no evaluation.json with rows")
        return None
    return {
        "rows": list(rows.values()),
        "compare": compare if _are_rows(compare, rows) else _last_stages(list(rows)),
        "meta": {str(key): _text(value) for key, value in meta.items()},
    }


def _are_rows(names: Any, rows: Mapping[str, Any]) -> bool:
    return isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) and name in rows for name in names)


def _last_stages(names: Sequence[str]) -> list[str]:
    """The two rows to compare among results that may also hold ablations; fewer when there is one row only."""
    stages = [name for i, name in enumerate(names) if i == 0 or name.startswith("after ")]
    return (stages if len(stages) > 1 else list(names))[-2:]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {
        str(condition): {str(key): _finite(value) for key, value in cell.items()}
        for condition, cell in row["cells"].items()
        if cell is not None
    }
    for condition, cell in cells.items():
        if not isinstance(cell.get("accuracy"), int | float):
            raise ValueError(f"row {row['name']!r}, {condition!r}: accuracy is {cell.get('accuracy')!r}")
    return {"name": str(row["name"]), "cells": cells}


def _json(path: Path, notes: list[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path} is not readable JSON: {error}")
        return {"rows": []}


def _given(path: Path) -> Any:
    """An evaluation file that was asked for: what is wrong with it is an error, not a note on the page."""
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        for row in source["rows"]:
            _row(row)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"The evaluation file {path} cannot be used ({one_line(repr(error))}); it must be JSON with rows of name "
            "and cells. Leave it out, or write it anew."
        ) from error
    return source


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """``value`` with ``None`` for numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(title: str, data: Mapping[str, Any]) -> str:
    assets = files("opensearch_lightning.dashboards") / "assets"
    style = (assets / "style.css").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        policy=f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}",
        style=style,
        data=page_json(data),
        script=script,
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
