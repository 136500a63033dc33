"""``opensearch report``: one HTML page about runs."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from opensearch_lightning.dashboards.report import write_report
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.paths import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to ``parser``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run directories, in the order to show them")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page to write (default: report.html in the last run directory)"
    )
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE", help="held-out results (default: evaluation.json of the runs)"
    )
    parser.add_argument("--title", default="Training report", help="heading of the page")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints where it is; returns the exit status 0.

    Raises:
        ConfigurationError: when a run directory or the evaluation file is not there, or the page cannot be written.
    """
    for directory in args.runs:
        if not directory.is_dir():
            raise ConfigurationError(f"There is no run directory {directory}; give one that a training run wrote.")
    out = args.out or args.runs[-1] / "report.html"
    check_file("--out", out)
    path = write_report(args.runs, out, args.evaluation, title=args.title)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
