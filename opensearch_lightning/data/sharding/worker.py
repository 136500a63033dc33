"""One block of records as chunk files: what a process of a sharding job does."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Event
from typing import Any

from opensearch_lightning.data.digests import content_digest
from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.lengths import length_in_place_of
from opensearch_lightning.data.renderers import RowRenderers
from opensearch_lightning.data.rows import sft_record, task_record
from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.data.shard_writer import ChunkWriter, Record
from opensearch_lightning.data.sharding.blocks import Block, read_block
from opensearch_lightning.data.sharding.card_stats import CorpusStats
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.shards import ShardKind
from opensearch_lightning.data.sources import ImageStore, parse_rl, parse_sft
from opensearch_lightning.errors import DataError, RenderError

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """The job was told to stop; the block is not finished."""


@dataclass(frozen=True, kw_only=True)
class WrittenBlock:
    """What became of a block; all of it is JSON.

    Args:
        number: of the block.
        source: place of its source.
        rows: records read.
        files: chunk files as LitData's index describes them.
        config: of LitData's index.
        digests: of each row kept.
        tasks: of each RL task kept: place in the block, digest of question and images, id.
        dropped: reason and name of each row dropped.
        stats: of the rows kept, see :class:`~opensearch_lightning.data.sharding.card_stats.CorpusStats`.
    """

    number: int
    source: int
    rows: int
    files: list[Mapping[str, Any]]
    config: Mapping[str, Any]
    digests: list[str]
    tasks: list[tuple[int, str, str]]
    dropped: list[tuple[str, str]]
    stats: Mapping[str, Any]


@dataclass(kw_only=True)
class _Found:
    """What the rows of a block so far come to."""

    stats: CorpusStats = field(default_factory=CorpusStats)
    tasks: list[tuple[int, str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)


class BlockWriter:
    """Writes blocks one after the other.

    Args:
        settings: of the job.
        images: where the images of each source are found.
        processor: counts tokens; ``None``: none are.
        stop: ends the work at the next row when set.
    """

    def __init__(
        self, settings: ShardSettings, images: Sequence[ImageStore], processor: Any, stop: Event | None = None
    ) -> None:
        self._settings, self._images, self._stop = settings, images, stop
        self._renderers = RowRenderers(processor, render_tools=settings.render_tools) if processor is not None else None

    def write(self, block: Block) -> WrittenBlock:
        """Read a block's records and write its chunk files into a folder beside them, named as the block's file.

        Raises:
            Stopped: see the constructor.
            OSError: the disk is full, or the like.
        """
        folder = block.records.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        writer = ChunkWriter(folder, chunk_bytes=self._settings.chunk_bytes)
        found = _Found()
        for place, (name, raw) in enumerate(read_block(block.records)):
            if self._stop is not None and self._stop.is_set():
                raise Stopped
            try:
                record = (
                    self._task(raw, name, place, block, found) if self._is_rl else self._row(raw, name, block, found)
                )
                writer.add(*record)
            except UnusableRow as error:
                found.dropped.append((str(error.reason), name))
                _log.info("%s cannot be used: %s", name, error)
        chunks = writer.close()
        block.records.unlink()
        return WrittenBlock(
            number=block.number,
            source=block.source,
            rows=block.rows,
            files=list(chunks.files),
            config=chunks.config,
            digests=list(chunks.digests),
            tasks=found.tasks,
            dropped=found.dropped,
            stats=found.stats.to_json(),
        )

    @property
    def _is_rl(self) -> bool:
        return self._settings.kind == ShardKind.RL

    def _row(self, raw: Any, name: str, block: Block, found: _Found) -> Record:
        row = parse_sft(raw, name=name, images=self._images[block.source])
        found.stats.add_row(row, self._tokens(row, name))
        return sft_record(row)

    def _task(self, raw: Any, name: str, place: int, block: Block, found: _Found) -> Record:
        if place in block.duplicates:
            raise UnusableRow(DropReason.DUPLICATE, "an earlier task asks the same of the same images.")
        task = parse_rl(raw, name=name, images=self._images[block.source])
        task = replace(task, id=block.new_ids.get(place, task.id))
        try:
            record = task_record(task)
            json.dumps(record[0], ensure_ascii=False, allow_nan=False).encode()
        except (DataError, TypeError, ValueError, RecursionError) as error:
            raise UnusableRow(DropReason.BAD_RECORD, str(error)) from error
        found.tasks.append((place, content_digest(task.question, *task.images).hex(), task.id))
        found.stats.add_task(task)
        return record

    def _tokens(self, row: SFTRow, name: str) -> int | None:
        if self._renderers is None:
            return None
        try:
            return self._renderers.length(row)
        except RenderError as error:
            _log.info("%s cannot be rendered: %s", name, error)
            return length_in_place_of(error)


_writer: BlockWriter | None = None


def start_process(settings: ShardSettings, images: Sequence[ImageStore], stop: Event) -> None:
    """Make this process ready for :func:`write_block`; it ends with the one that started it, however that ends."""
    global _writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job hears it, and says when to stop
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by the job's own process"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _writer = BlockWriter(settings, images, settings.load_processor(), stop)


def write_block(block: Block) -> WrittenBlock:
    """:meth:`BlockWriter.write` in a process made ready."""
    assert _writer is not None, "start_process comes first"
    return _writer.write(block)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
