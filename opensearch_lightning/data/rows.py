"""SFT rows and RL tasks to and from shards."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReport, UnusableRow
from opensearch_lightning.data.images import load_image
from opensearch_lightning.data.shards import Record, ShardKind, write_shards
from opensearch_lightning.data.sharegpt import SFTRow, parse_sharegpt
from opensearch_lightning.errors import DataError
from opensearch_lightning.types import Task

_log = logging.getLogger(__name__)


def write_sft_shards(
    rows: Iterable[Any],
    out: Path | str,
    *,
    image_root: Path | str | None = None,
    max_dropped: float = 0.01,
    chunk_bytes: int = 64 * 2**20,
) -> DropReport:
    """Write expert trajectories as shards.

    Args:
        rows: ShareGPT records; or pairs of a name and a record, as
            :func:`~opensearch_lightning.data.read_sharegpt` yields.
        out: folder to make.
        image_root: folder of image paths.
        max_dropped: largest fraction of unusable rows that is accepted; no folder is left behind a failure.
        chunk_bytes: size of a chunk file.

    Returns:
        What was kept and dropped, by reason.

    Raises:
        DataError: ``out`` exists, or too many rows cannot be used.
    """
    report = DropReport(str(out), limit=max_dropped)
    root = Path(image_root) if image_root is not None else None
    write_shards(_usable(rows, root, report), out, kind=ShardKind.SFT, chunk_bytes=chunk_bytes)
    return report


def _usable(rows: Iterable[Any], root: Path | None, report: DropReport) -> Iterator[Record]:
    for index, row in enumerate(rows):
        name, record = row if isinstance(row, tuple) else (f"row {index}", row)
        try:
            parsed = parse_sharegpt(record, name=name, image_root=root)
        except UnusableRow as error:
            report.drop(error.reason, name)
            _log.warning("%s cannot be used: %s", name, error)
            continue
        report.kept += 1
        yield sft_record(parsed)
    # Raised inside of the writing, so that nothing is left on disk.
    report.check()


def sft_record(row: SFTRow) -> Record:
    """A row as it is stored."""
    return {
        "id": row.id,
        "conversations": [list(turn) for turn in row.conversations],
        "system": row.system,
        "tools": list(row.tools),
    }, row.images


def sft_row(record: Mapping[str, Any], images: tuple[bytes, ...]) -> SFTRow:
    """A row as it was stored."""
    return SFTRow(
        id=record["id"],
        conversations=tuple((speaker, text) for speaker, text in record["conversations"]),
        images=images,
        system=record["system"],
        tools=tuple(record["tools"]),
    )


def write_rl_shards(tasks: Iterable[Task], out: Path | str, *, chunk_bytes: int = 64 * 2**20) -> int:
    """Write tasks as shards.

    Args:
        tasks: tasks with distinct ids; their metadata must be JSON (tuples come back as lists).
        out: folder to make.
        chunk_bytes: size of a chunk file.

    Returns:
        Number of tasks.

    Raises:
        DataError: ``out`` exists, an id comes twice (groups are formed by id), an image cannot be decoded, or there
            is no task.
    """
    return write_shards(_task_records(tasks), out, kind=ShardKind.RL, chunk_bytes=chunk_bytes)


def _task_records(tasks: Iterable[Task]) -> Iterator[Record]:
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise DataError(f"task id {task.id!r} comes twice; groups are formed by id, so give each task its own.")
        seen.add(task.id)
        try:
            images = [load_image(image, None) for image in task.images]
        except UnusableRow as error:
            raise DataError(f"task {task.id!r}: {error}") from error
        yield (
            {
                "id": task.id,
                "question": task.question,
                "answer": task.answer,
                "aliases": list(task.aliases),
                "metadata": dict(task.metadata),
            },
            images,
        )


def rl_task(record: Mapping[str, Any], images: tuple[bytes, ...]) -> Task:
    """A task as it was stored."""
    return Task(
        id=record["id"],
        question=record["question"],
        answer=record["answer"],
        aliases=tuple(record["aliases"]),
        images=images,
        metadata=record["metadata"],
    )
