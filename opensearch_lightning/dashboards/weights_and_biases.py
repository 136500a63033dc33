"""Weights & Biases: offline unless asked otherwise, and without rows lost when a run resumes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.wandb import WandbLogger

from opensearch_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from wandb import Run

STEP_METRIC = "trainer/global_step"
"""The x axis of every chart: the step that Lightning logs with."""

_SETTINGS = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


def wandb_logger(
    save_dir: str | os.PathLike[str],
    *,
    offline: bool = True,
    project: str = "opensearch-lightning",
    name: str | None = None,
) -> WandbLogger:
    """A W&B logger for the run directory ``save_dir``; the W&B run itself starts with the first thing logged.

    Metrics only: no code, console text, package list or machine data leave the process, and no images are logged, so
    nothing grows without bound.

    W&B drops rows whose internal step is not larger than one it has. A resumed run starts counting anew offline,
    so there every process writes a W&B run of its own and ``name`` groups them; online they share one run, which the
    server continues. Charts are drawn over :data:`STEP_METRIC` in either case. A killed process loses what W&B had not
    written yet; ``metrics.csv`` does not.

    Args:
        save_dir: run directory; W&B writes to ``<save_dir>/wandb``.
        offline: write files only (``wandb sync`` uploads them later). ``False`` needs a network and a W&B login.
        project: W&B project.
        name: display name; the name of ``save_dir`` by default.

    Raises:
        ConfigurationError: when the package ``wandb`` is not installed.
    """
    directory = Path(save_dir)
    name = name or directory.resolve().name
    try:
        return _LocalStepWandb(directory, offline=offline, project=project, name=name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "The W&B logger needs the package 'wandb', which is not installed. "
            "Install it (pip install wandb), or leave W&B out: metrics.csv holds the same figures."
        ) from error


class _LocalStepWandb(WandbLogger):
    """Lightning's W&B logger with a run that this module starts."""

    def __init__(self, directory: Path, *, offline: bool, project: str, name: str) -> None:
        super().__init__(save_dir=directory, project=project, name=name, offline=offline)
        self._directory = directory

    @property
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The W&B run of this process; made when first asked for."""
        if self._experiment is None:
            self._experiment = self._start()
        return self._experiment

    def _start(self) -> Run:
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        identity: dict[str, Any] = (
            {"mode": "offline", "id": secrets.token_hex(4)}
            if self._offline
            else {"mode": "online", "id": _stable_id(self._directory), "resume": "allow"}
        )
        run = wandb.init(
            project=self._project,
            name=self._name,
            group=self._name,
            dir=str(self._directory),
            settings=wandb.Settings(**_SETTINGS),
            **identity,
        )
        run.define_metric(STEP_METRIC)
        run.define_metric("*", step_metric=STEP_METRIC, step_sync=True)
        return run


def _stable_id(directory: Path) -> str:
    """The W&B id of a run directory, drawn once."""
    path = directory / "wandb_run_id.txt"
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
