"""The processes of a sharding job, and the blocks that they write."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from opensearch_lightning.data.sharding.blocks import Block
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.sharding.state import PartialShards
from opensearch_lightning.data.sharding.worker import BlockWriter, WrittenBlock, start_process, write_block
from opensearch_lightning.data.sources import ImageStore

_PRELOADED = ["opensearch_lightning.data.sharding.worker", "litdata.streaming.writer"]
_PRELOADED_WITH_PROCESSOR = ["opensearch_lightning.models", "transformers.models.auto.processing_auto"]

WriteBlock = Callable[[Block], "Future[WrittenBlock]"]
"""Begins to write a block."""


@contextmanager
def block_writer(
    settings: ShardSettings, images: Sequence[ImageStore], processor: Any, *, workers: int
) -> Iterator[WriteBlock]:
    """What writes a block, here or in another process.

    Args:
        settings: of the job.
        images: where the images of each source are found.
        processor: counts tokens here; other processes load their own.
        workers: number of processes; 0: this one writes.
    """
    if workers == 0:
        here = BlockWriter(settings, images, processor)

        def write(block: Block) -> "Future[WrittenBlock]":
            future: Future[WrittenBlock] = Future()
            future.set_result(here.write(block))
            return future

        yield write
        return
    # A process forked from one with threads may hang, and one that is spawned imports everything once more.
    context = multiprocessing.get_context("forkserver")
    with_processor = _PRELOADED_WITH_PROCESSOR if settings.processor is not None else []
    context.set_forkserver_preload(_PRELOADED + with_processor)
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, start_process, (settings, images, stop))
    try:
        yield lambda block: pool.submit(write_block, block)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def write_all(
    blocks: Iterable[Block],
    write: WriteBlock,
    partial: PartialShards,
    *,
    workers: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write blocks and keep them, every process busy with one block waiting; more would only fill the disk.

    Args:
        blocks: cut when a process is about to take them.
        write: of :func:`block_writer`.
        partial: keeps what is written.
        workers: number of processes.
        progress: told the number of records of each block done.
    """
    running: dict[Future[WrittenBlock], Block] = {}
    for block in blocks:
        running[write(block)] = block
        if len(running) > workers:
            _keep_done(running, partial, progress)
    while running:
        _keep_done(running, partial, progress)


def _keep_done(
    running: dict["Future[WrittenBlock]", Block], partial: PartialShards, progress: Callable[[int], None]
) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        block = running.pop(future)
        partial.keep(future.result(), block.records.with_suffix(""))
        progress(block.rows)
