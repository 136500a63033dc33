"""TrajectoryLog: some whole trajectories on disk, for the viewer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from opensearch_lightning.dashboards.records import TrajectoryRecord, trajectory_record, write_images
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.paths import check_folder
from opensearch_lightning.types import ImageInput, RolloutBatch, TrajectoryGroup

if TYPE_CHECKING:
    from opensearch_lightning.modules.grpo import AdvantageRecord

_FILE_NAME = re.compile(r"(?P<split>.+)-(?P<step>\d{8})\.jsonl")


class TrajectoryLog(Callback):
    """Writes whole trajectory groups: tokens with their mask, calls, observations, rewards, advantages, pictures.

    The first rank writes, its own groups. A step and split make one JSON Lines file
    ``<directory>/<split>-<step>.jsonl``, one :class:`~opensearch_lightning.dashboards.records.TrajectoryRecord` a line,
    written at once; pictures lie in ``<directory>/images`` under their content's hash. ``step`` counts training batches
    from 0, as the metrics do.

    Of a training batch the groups with the most different outcomes are taken; of a validation the first ones, so that
    the same tasks return. It reads ``batch.groups``, hence stands behind the callbacks that fill and mask it, and
    ``pl_module.last_advantages``, which :class:`~opensearch_lightning.modules.FatalAwareGRPO` sets, where there is one.

    The number of files of a split stays within ``keep`` + 1: the steps so far fall into at most ``keep`` equal spans,
    whose width is a power of two, and the first file of each span stays, next to the newest. What is kept depends on
    the steps alone, so a resumed run, which drops the files behind its checkpoint, ends with the same files as an
    uninterrupted one.

    Args:
        decode: text of token ids, special tokens included, such as ``processor.tokenizer.decode``.
        directory: where to write; ``<run directory>/trajectories`` by default, the run directory being the trainer's
            ``log_dir``.
        every_n_steps: write after every n-th training batch, the first one included; 0: none of training.
        groups: groups written of a training batch.
        val_groups: groups written of each validation dataloader; 0: none.
        keep: files kept of each split.

    Raises:
        ConfigurationError: for a negative count, ``keep`` below 2, or a ``directory`` that cannot be written.

    Example:
        >>> log = TrajectoryLog(lambda ids: " ".join(map(str, ids)), every_n_steps=20)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        directory: str | Path | None = None,
        every_n_steps: int = 10,
        groups: int = 2,
        val_groups: int = 8,
        keep: int = 32,
    ) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 0),
            ("groups", groups, 0),
            ("val_groups", val_groups, 0),
            ("keep", keep, 2),
        ):
            if value < least:
                raise ConfigurationError(f"TrajectoryLog: {name} is {value}; set it to {least} or more.")
        if directory is not None:
            check_folder("TrajectoryLog: directory", Path(directory))
        self._decode = decode
        self._directory = None if directory is None else Path(directory)
        self._every_n_steps = every_n_steps
        self._groups = groups
        self._val_groups = val_groups
        self._keep = keep
        self._cleared = False
        self._validation: dict[str, list[TrajectoryGroup]] = {}

    @property
    def directory(self) -> Path:
        """Where the files go; known from ``setup`` on.

        Raises:
            ConfigurationError: when asked for earlier without a ``directory`` of one's own.
        """
        if self._directory is None:
            raise ConfigurationError("TrajectoryLog has no directory before the trainer sets it up; pass directory=….")
        return self._directory

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the run directory from the trainer; every rank has to ask for it."""
        run_directory = trainer.log_dir or trainer.default_root_dir
        if self._directory is None:
            self._directory = Path(run_directory) / "trajectories"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins a run, or goes on with one."""
        self._cleared = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Before the first batch: drops the files of steps yet to come, leftovers behind the checkpoint."""
        if not self._cleared and trainer.is_global_zero:
            _remove(path for path, _, step in _files(self.directory) if step >= _step(trainer))
            _remove_unused_images(self.directory)
        self._cleared = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Writes the batch's most telling groups when its turn has come."""
        due = self._every_n_steps and _step(trainer) % self._every_n_steps == 0
        if due and self._groups and trainer.is_global_zero:
            advantages = _advantages(getattr(pl_module, "last_advantages", None))
            self._write(trainer, batch.split, _most_telling(batch.groups, self._groups), advantages)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets a validation that was cut short."""
        self._validation = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: RolloutBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the first groups of each split until the validation is over."""
        kept = self._validation.setdefault(batch.split, [])
        kept.extend(batch.groups[: self._val_groups - len(kept)])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes what was kept, a file a split; nothing for the sanity check or outside ``fit``."""
        if trainer.is_global_zero and trainer.validating and trainer.state.fn == TrainerFn.FITTING:
            for split, groups in self._validation.items():
                self._write(trainer, split, groups, {})
        self._validation = {}

    def _write(
        self,
        trainer: Trainer,
        split: str,
        groups: Sequence[TrajectoryGroup],
        advantages: Mapping[tuple[str, int], tuple[float, float]],
    ) -> None:
        if not groups:
            return
        step = _step(trainer)
        records: list[TrajectoryRecord] = []
        images: list[ImageInput] = []
        for group in groups:
            kept_steps = group.kept_steps or (None,) * len(group.trajectories)
            for trajectory, kept_before in zip(group.trajectories, kept_steps, strict=True):
                raw, advantage = advantages.get((trajectory.task_id, trajectory.rollout), (None, None))
                images.extend(trajectory.images)
                records.append(
                    trajectory_record(
                        group.task,
                        trajectory,
                        self._decode,
                        kept_before=kept_before,
                        advantage=advantage,
                        raw_advantage=raw,
                        global_step=trainer.global_step,
                        split=split,
                        step=step,
                    )
                )
        write_images(images, self.directory / "images")
        path = self.directory / f"{split}-{step:08d}.jsonl"
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")
        scratch.replace(path)
        self._thin(split)

    def _thin(self, split: str) -> None:
        steps = {step: path for path, name, step in _files(self.directory) if name == split}
        kept = kept_steps(sorted(steps), self._keep)
        if len(kept) < len(steps):
            _remove(path for step, path in steps.items() if step not in kept)
            _remove_unused_images(self.directory)


def kept_steps(steps: Sequence[int], keep: int) -> set[int]:
    """The steps of the ascending ``steps`` whose files stay: the first in each of at most ``keep`` spans, and the last.

    Spans are ``[0, width), [width, 2·width), …`` with the smallest power of two as width that needs no more than
    ``keep`` of them; the first of a doubled span is the first of one of its halves, so nothing dropped is missed later.
    """
    if not steps:
        return set()
    width = 1
    while steps[-1] // width >= keep:
        width *= 2
    firsts: dict[int, int] = {}
    for step in steps:
        firsts.setdefault(step // width, step)
    return {*firsts.values(), steps[-1]}


def _step(trainer: Trainer) -> int:
    """The step that Lightning logs metrics with, so that files and curves name the same batch alike."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _advantages(record: AdvantageRecord | None) -> dict[tuple[str, int], tuple[float, float]]:
    """Advantage before and after the clamp by task id and rollout; rows without a vote are left out."""
    if record is None:
        return {}
    rows = zip(record.trajectories, record.raw.tolist(), record.advantages.tolist(), record.valid.tolist(), strict=True)
    return {(item.task_id, item.rollout): (raw, clamped) for item, raw, clamped, valid in rows if valid}


def _most_telling(groups: Sequence[TrajectoryGroup], count: int) -> list[TrajectoryGroup]:
    def variety(group: TrajectoryGroup) -> int:
        return len({(item.is_fatal, item.reward and item.reward.accuracy >= 0.5) for item in group.trajectories})

    return sorted(groups, key=variety, reverse=True)[:count]


def _files(directory: Path) -> list[tuple[Path, str, int]]:
    """Path, split and step of each trajectory file."""
    found = ((path, _FILE_NAME.fullmatch(path.name)) for path in sorted(directory.glob("*.jsonl")))
    return [(path, match["split"], int(match["step"])) for path, match in found if match]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_unused_images(directory: Path) -> None:
    """Removes the pictures that no trajectory left on disk names."""
    used: set[str] = set()
    for path, _, _ in _files(directory):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                used.update(image["file"] for image in json.loads(line)["images"])
    _remove(path for path in (directory / "images").glob("*") if path.name not in used)
