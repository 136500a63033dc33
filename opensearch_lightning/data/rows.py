"""SFT rows and RL tasks to and from shards."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReport, UnusableRow
from opensearch_lightning.data.images import checked_shape, load_image
from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.data.shard_writer import Record, write_shards
from opensearch_lightning.data.shards import ShardKind
from opensearch_lightning.data.sources import ImageStore, parse_sft
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
        rows: records of any form that :func:`~opensearch_lightning.data.parse_sft` reads; or pairs of a name and a
            record, as :func:`~opensearch_lightning.data.read_records` yields.
        out: folder to make.
        image_root: folder of image paths.
        max_dropped: largest fraction of unusable rows that is accepted; no folder is left behind a failure.
        chunk_bytes: size of a chunk file.

    Returns:
        What was kept and dropped, by reason.

    Raises:
        DataError: ``out`` exists, or too many rows cannot be used.
        ConfigurationError: ``max_dropped`` outside [0, 1].
    """
    report = DropReport(str(out), limit=max_dropped)
    images = ImageStore(() if image_root is None else (Path(image_root),))
    write_shards(_usable(rows, images, report), out, kind=ShardKind.SFT, chunk_bytes=chunk_bytes)
    return report


def _usable(rows: Iterable[Any], images: ImageStore, report: DropReport) -> Iterator[Record]:
    for index, row in enumerate(rows):
        name, record = row if isinstance(row, tuple) else (f"row {index}", row)
        try:
            parsed = parse_sft(record, name=name, images=images)
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
        tasks: tasks with distinct ids, a question and an answer, and images at most 100 times longer than wide; their
            metadata must be JSON (tuples come back as lists).
        out: folder to make.
        chunk_bytes: size of a chunk file.

    Returns:
        Number of tasks.

    Raises:
        DataError: ``out`` exists, an id comes twice (groups are formed by id), a text is missing or none, an image
            cannot be decoded or is too long, or there is no task. The message names the task.
    """
    return write_shards(_task_records(tasks), out, kind=ShardKind.RL, chunk_bytes=chunk_bytes)


def _task_records(tasks: Iterable[Task]) -> Iterator[Record]:
    seen: set[str] = set()
    for task in tasks:
        record = task_record(task)
        if task.id in seen:
            raise DataError(f"task id {task.id!r} comes twice; groups are formed by id, so give each task its own.")
        seen.add(task.id)
        yield record


def task_record(task: Task) -> Record:
    """A task as it is stored.

    Raises:
        DataError: a text is missing or none, or an image cannot be decoded or is too long.
    """
    _check_texts(task)
    images = _task_images(task)
    return {
        "id": task.id,
        "question": task.question,
        "answer": task.answer,
        "aliases": list(task.aliases),
        "metadata": dict(task.metadata),
    }, images


def _check_texts(task: Task) -> None:
    if not isinstance(task.aliases, list | tuple):
        raise DataError(f"task {task.id!r}: aliases are a list of texts, got {task.aliases!r:.80}.")
    texts = [("id", task.id), ("question", task.question), ("answer", task.answer)]
    for part, text in [*texts, *(("alias", alias) for alias in task.aliases)]:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"task {task.id!r}: its {part} must be a text that is not empty, got {text!r:.80}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"task {task.id!r}: its {part} holds half a surrogate pair: {text!r:.80}.") from error
    if not isinstance(task.metadata, Mapping):
        raise DataError(f"task {task.id!r}: metadata are a mapping, got {task.metadata!r:.80}.")


def _task_images(task: Task) -> list[bytes]:
    if not isinstance(task.images, list | tuple):
        raise DataError(f"task {task.id!r}: images are a list of encoded files, got {type(task.images).__name__}.")
    images = []
    for number, image in enumerate(task.images, start=1):
        try:
            images.append(checked_shape(load_image(image)))
        except UnusableRow as error:
            raise DataError(f"task {task.id!r}, image {number}: {error}") from error
    return images


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
