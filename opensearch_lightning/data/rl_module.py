"""The DataModule of reinforcement learning: batches of tasks, whose answers are rolled out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from opensearch_lightning.data.drops import DropReason, DropReport, checked_max_dropped
from opensearch_lightning.data.loader import ResumableDataModule, Sealed, check_counts
from opensearch_lightning.data.order.epochs import EpochOrder, Rows
from opensearch_lightning.data.remote import is_remote
from opensearch_lightning.data.rows import rl_task
from opensearch_lightning.data.shards import ShardKind, ShardReader, Shards, folder_list
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import RolloutBatch, Task

_log = logging.getLogger(__name__)
VAL_SPLITS = ("val_greedy", "val_sampled")


class SearchVLRLDataModule(ResumableDataModule):
    """Tasks from shards, ``prompts_per_step`` a batch, endlessly.

    Train with ``Trainer(max_steps=…)``: the train loader has no end. Its order is a pure function of the seed and the
    number of a batch, no batch holds a task twice, and resuming goes on behind the last batch trained. With
    ``val_shards`` there are two validation loaders over the same tasks, whose batches carry the splits
    ``val_greedy`` and ``val_sampled``.

    Args:
        shards: one or more folders written by :func:`~opensearch_lightning.data.write_rl_shards`.
        prompts_per_step: tasks of one step, all ranks together.
        val_shards: folders of validation tasks; none: no validation.
        val_batch: tasks of a validation batch on one rank.
        val_tasks: how many validation tasks to take from the front; all by default.
        seed: seed of the order.
        prompt_tokens: tells the tokens of a task's whole first prompt (system, tools, question, images); needed for
            ``max_prompt_tokens``.
        max_prompt_tokens: a task with a longer prompt is refused, named and counted.
        max_dropped: largest fraction of refused tasks that is accepted.
        num_workers: processes that read tasks ahead.

    Raises:
        ConfigurationError: ``prompts_per_step`` or the validation tasks cannot be shared equally by the ranks, more
            prompts than tasks, a limit without ``prompt_tokens``, ``max_dropped`` outside [0, 1]; from ``setup``,
            shards on another machine.
        DataError: from ``setup``, when shards are missing or too many tasks are refused.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        prompts_per_step: int,
        val_shards: Shards | None = None,
        val_batch: int = 64,
        val_tasks: int | None = None,
        seed: int = 3407,
        prompt_tokens: Callable[[Task], int] | None = None,
        max_prompt_tokens: int | None = None,
        max_dropped: float = 0.01,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if max_prompt_tokens is not None and prompt_tokens is None:
            raise ConfigurationError(
                f"max_prompt_tokens = {max_prompt_tokens} needs prompt_tokens, which counts a task's prompt."
            )
        check_counts(1, prompts_per_step=prompts_per_step, val_batch=val_batch)
        check_counts(0, seed=seed, num_workers=num_workers)
        if val_tasks is not None:
            check_counts(1, val_tasks=val_tasks)
        self._shards, self._val_shards = shards, val_shards
        self._prompts_per_step, self._val_batch, self._val_tasks = prompts_per_step, val_batch, val_tasks
        self._seed, self._num_workers = seed, num_workers
        self._prompt_tokens, self._max_prompt_tokens = prompt_tokens, max_prompt_tokens
        self._max_dropped = checked_max_dropped(max_dropped)
        self._train: _Tasks | None = None
        self._val: _Tasks | None = None

    def setup(self, stage: str | None = None) -> None:
        """Open the shards and refuse tasks with too long a prompt."""
        if self._train is None and stage in (None, "fit"):
            self._train = self._open(self._shards, None)
        if self._val is None and self._val_shards is not None and stage in (None, "fit", "validate"):
            self._val = self._open(self._val_shards, self._val_tasks)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Open the batch where nothing is left to be moved: tasks hold no tensors."""
        return batch.batch if isinstance(batch, Sealed) else batch

    @property
    def n_tasks(self) -> int:
        """Usable training tasks."""
        return len(self._ready().rows)

    def train_dataloader(self) -> Iterable[RolloutBatch]:
        """Batches of this rank, from behind the last one trained."""
        return self._endless(self._batches(), num_workers=self._num_workers)

    def train_batch(self, number: int) -> RolloutBatch:
        """Batch ``number`` of this rank, whatever was trained: rollouts that run ahead ask for it."""
        return self._batches().batch(number)

    def val_dataloader(self) -> list[Iterable[RolloutBatch]]:
        """A greedy and a sampled pass over the validation tasks."""
        if self._val is None:
            self.setup("validate")
        if self._val is None:
            return []
        self._check_divides("val_tasks", len(self._val.rows))
        own = _Tasks(self._val.reader, self._val.rows[self._rank :: self._world_size])
        loaders = [_ValLoader(own, batch_size=self._val_batch, split=split) for split in VAL_SPLITS]
        return [self._for_trainer(loader) for loader in loaders]

    def _batches(self) -> "_TrainBatches":
        tasks = self._ready()
        self._check_divides("prompts_per_step", self._prompts_per_step)
        order = EpochOrder(n_rows=len(tasks.rows), batch_size=self._prompts_per_step, seed=self._seed)
        return _TrainBatches(tasks, order, rank=self._rank, world_size=self._world_size)

    def _order(self) -> Mapping[str, int | str]:
        tasks = self._ready()
        return {
            "seed": self._seed,
            "prompts_per_step": self._prompts_per_step,
            "tasks": len(tasks.rows),
            "shards": tasks.reader.digest,
        }

    def _check_divides(self, name: str, value: int) -> None:
        if value % self._world_size:
            nearest = value - value % self._world_size or self._world_size
            raise ConfigurationError(
                f"{name} = {value} cannot be shared equally by {self._world_size} ranks; set it to {nearest}."
            )

    def _ready(self) -> "_Tasks":
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        return self._train

    def _open(self, shards: Shards, limit: int | None) -> "_Tasks":
        if far := [folder for folder in folder_list(shards) if is_remote(folder)]:
            raise ConfigurationError(f"{far[0]} lies on another machine: copy the folder here, and give its path.")
        reader = ShardReader(shards, kind=ShardKind.RL)
        rows = np.arange(min(len(reader), limit) if limit is not None else len(reader))
        if self._max_prompt_tokens is None or self._prompt_tokens is None:
            return _Tasks(reader, rows)
        report = DropReport(f"tasks of {shards}", limit=self._max_dropped)
        kept = [int(row) for row in rows if self._fits(_Tasks(reader, rows).task(int(row)), report)]
        report.check()
        if report.n_dropped:
            _log.warning("%s", report)
        return _Tasks(reader, np.array(kept))

    def _fits(self, task: Task, report: DropReport) -> bool:
        assert self._prompt_tokens is not None and self._max_prompt_tokens is not None
        tokens = self._prompt_tokens(task)
        if tokens > self._max_prompt_tokens:
            report.drop(DropReason.TOO_LONG, f"{task.id}: {tokens} tokens")
            return False
        report.kept += 1
        return True


class _Tasks:
    def __init__(self, reader: ShardReader, rows: Rows) -> None:
        self.reader, self.rows = reader, rows

    def task(self, row: int) -> Task:
        return rl_task(*self.reader[row])

    def tasks(self, rows: Rows) -> list[Task]:
        return [self.task(int(row)) for row in rows]


class _TrainBatches:
    def __init__(self, tasks: _Tasks, order: EpochOrder, *, rank: int, world_size: int) -> None:
        self._tasks, self._order = tasks, order
        self._rank, self._world_size = rank, world_size

    def batch(self, number: int) -> RolloutBatch:
        own = self._order.batch(number)[self._rank :: self._world_size]
        return RolloutBatch(tasks=self._tasks.tasks(self._tasks.rows[own]), number=number)


class _ValLoader:
    """Sized, and no DataLoader: Lightning would split one among the ranks once more."""

    def __init__(self, tasks: _Tasks, *, batch_size: int, split: str) -> None:
        self._tasks, self._batch_size, self._split = tasks, batch_size, split

    def __len__(self) -> int:
        return -(-len(self._tasks.rows) // self._batch_size)

    def __iter__(self) -> Iterator[RolloutBatch]:
        rows = self._tasks.rows
        for start in range(0, len(rows), self._batch_size):
            tasks = self._tasks.tasks(rows[start : start + self._batch_size])
            yield RolloutBatch(tasks=tasks, split=self._split)
