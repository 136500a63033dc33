"""Metrics of a run as one CSV file that survives kills and resumes."""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from opensearch_lightning.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

FILE_NAME = "metrics.csv"
_FIRST_COLUMNS = ("step", "epoch")


class MetricsCSV(Logger):
    """Lightning logger that writes ``<directory>/metrics.csv``: one row a step, one column a metric.

    ``step`` is the step that Lightning logs with: training batches counted from 0 under manual optimization, however
    many optimizer updates each of them made. What is logged at one step, by training or by validation inside ``fit``,
    goes into one row; a metric that was not logged at a step leaves its cell empty. Columns are ``step``, ``epoch``,
    then the metrics by name.

    Every write replaces the file as a whole, so a killed process leaves a readable one. A run that resumes from a
    checkpoint drops the rows behind the step it goes on with, and a run that starts from nothing starts a new file:
    an interrupted run ends with the file of an uninterrupted one, measured times aside. What ``trainer.validate`` and
    ``trainer.test`` log outside ``fit`` has no place among the training steps and is not written.

    Args:
        directory: the run directory; made when the first metric comes.

    Raises:
        DataError: when ``metrics.csv`` is there already and is not a file of this logger.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(logger=MetricsCSV("runs/grpo"))  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._table = _Table(self.path)
        self._fitting = True
        self._fresh = False
        self._loaded = False

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self._directory.name

    @property
    def version(self) -> str:
        """Empty: a run directory holds one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory; Lightning puts checkpoints without a place of their own here."""
        return str(self._directory)

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._directory)

    @property
    def path(self) -> Path:
        """The CSV file."""
        return self._directory / FILE_NAME

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: a run's settings are stored with its configuration."""

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Notes how the stage that begins relates to the file.

        Lightning calls this once before each stage; it is the only place where a logger meets its trainer.
        """
        trainer: Any = model.trainer
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        self._fresh = trainer.ckpt_path is None and trainer.global_step == 0
        self._loaded = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Puts ``metrics`` into the row of ``step`` (default: a new row) and writes the file."""
        if not self._fitting:
            return
        if not self._loaded:
            self._table.load(last=-1 if self._fresh else step)
            self._loaded = True
        self._table.update(self._table.next_step if step is None else int(step), metrics)
        self._table.write()


class _Table:
    """Rows of text cells by step, and their file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[int, dict[str, str]] = {}
        self._columns: list[str] = []
        self._lines: dict[int, str] = {}

    @property
    def next_step(self) -> int:
        return max(self._rows, default=-1) + 1

    def load(self, last: int | None) -> None:
        """Reads the rows up to step ``last``, that one included; ``None``: all of them.

        The row of ``last`` stays because a run that resumes inside a validation has logged its training half.
        """
        self._rows, self._columns, self._lines = {}, [], {}
        if (last is not None and last < 0) or not self._path.exists():
            return
        with self._path.open(newline="", encoding="utf-8") as file:
            try:
                rows = {int(row["step"]): row for row in csv.DictReader(file)}
            except (csv.Error, KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{self._path} is not a metrics file of this logger: no whole number under 'step' ({error!r}). "
                    "Move it away, or choose another run directory."
                ) from error
        for step, row in rows.items():
            if last is None or step <= last:
                self._rows[step] = {key: cell for key, cell in row.items() if cell and key != "step"}
        self._columns = self._order()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = self._rows.setdefault(step, {})
        row.update({key: _cell(value) for key, value in metrics.items() if key != "step"})
        self._lines.pop(step, None)
        if not row.keys() <= set(self._columns):
            self._columns = self._order()
            self._lines.clear()

    def write(self) -> None:
        """Replaces the file at once. Lines of earlier rows are kept as text: a write costs no more than copying."""
        for step, row in self._rows.items():
            if step not in self._lines:
                self._lines[step] = _line([str(step), *(row.get(key, "") for key in self._columns)])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(".csv.tmp")
        with scratch.open("w", newline="", encoding="utf-8") as file:
            file.write(_line(["step", *self._columns]))
            file.writelines(self._lines[step] for step in sorted(self._lines))
        scratch.replace(self._path)

    def _order(self) -> list[str]:
        names = {key for row in self._rows.values() for key in row}
        return sorted(names, key=lambda name: (name not in _FIRST_COLUMNS, name))


def _cell(value: Any) -> str:
    """Text of a scalar that reads back as the same number."""
    number = value.item() if hasattr(value, "item") else value
    return repr(int(number) if isinstance(number, bool | int) else float(number))


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
