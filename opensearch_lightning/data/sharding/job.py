"""Sources to shards in parallel: the same files whatever the number of processes, and however often interrupted."""

import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReason, DropReport, checked_max_dropped
from opensearch_lightning.data.lengths import lengths_file, write_lengths
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.shard_writer import WrittenChunks, write_index
from opensearch_lightning.data.sharding.blocks import Block, cut_blocks
from opensearch_lightning.data.sharding.card import corpus_card, lengths_of
from opensearch_lightning.data.sharding.card_pages import card_page, lengths_figure
from opensearch_lightning.data.sharding.card_stats import CorpusStats
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.sharding.state import PartialShards, check_complete
from opensearch_lightning.data.sharding.worker import BlockWriter, WrittenBlock, start_process, write_block
from opensearch_lightning.data.shards import META, ShardKind, ShardReader
from opensearch_lightning.data.sources import Source
from opensearch_lightning.errors import ConfigurationError, DataError

_PRELOADED = ["opensearch_lightning.data.sharding.worker", "litdata.streaming.writer"]
_PRELOADED_WITH_PROCESSOR = ["opensearch_lightning.models", "transformers.models.auto.processing_auto"]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """What shall become shards, and how.

    Args:
        sources: in the order of the rows to be.
        out: the folder to make; it appears whole.
        settings: what decides the files.
        max_dropped: largest fraction of unusable rows that is accepted.
        workers: processes that parse, check, count and write; 0: this one does. With processes, the program's main
            module must be importable, as with all of multiprocessing.
        fresh: begin anew, and replace what is there when the new shards are complete.
        progress: told the number of records done at the start and after each block.
    """

    sources: Sequence[Source]
    out: Path
    settings: ShardSettings
    max_dropped: float = 0.01
    workers: int = 1
    fresh: bool = False
    progress: Callable[[int], None] = lambda rows: None

    def __post_init__(self) -> None:
        checked_max_dropped(self.max_dropped)
        if self.workers < 0:
            raise ConfigurationError(f"workers is {self.workers}; set 0 or more")


def shard(job: ShardJob) -> DropReport | None:
    """Carry out a job, or go on with one that was interrupted.

    Returns:
        What was kept and dropped; ``None`` when the shards are there already, made from the same.

    Raises:
        DataError: too many rows cannot be used; a source changed; the disk is full. What is finished is kept for the
            next try, and shards that are there stay as they are.
        ConfigurationError: settings changed since the work began, or the folder is in use.
    """
    processor = job.settings.load_processor()
    names = distinct_names(job.sources)
    made_from = {
        "settings": job.settings.as_json(processor),
        "order": names,
        "sources": {name: source.fingerprint() for name, source in zip(names, job.sources, strict=True)},
    }
    if job.out.exists() and not job.fresh:
        check_complete(job.out, made_from, _meta(job.out))
        return None
    with _writing(job.out), PartialShards(job.out, made_from, fresh=job.fresh) as partial:
        _write_blocks(job, processor, partial)
        report = _report(job, partial)
        _finish(job, processor, partial, names, made_from, report)
        partial.publish()
    return report


def distinct_names(sources: Sequence[Source]) -> list[str]:
    """The name of each source, with a number behind one that was there before."""
    names: list[str] = []
    for source in sources:
        name, number = source.name, 1
        while name in names:
            number += 1
            name = f"{source.name}-{number}"
        names.append(name)
    return names


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror or error}. What is finished is kept: mend it and run the same "
            "command again to go on."
        ) from error
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that wrote {out} died, perhaps for want of memory. What is finished is kept: run the same "
            "command again with fewer workers to go on."
        ) from error


def _meta(out: Path) -> dict[str, Any]:
    try:
        return json.loads((out / META).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{out} exists already and holds no shards; name another folder, or remove it.") from error


def _write_blocks(job: ShardJob, processor: Any, partial: PartialShards) -> None:
    finished = partial.finished()
    job.progress(sum(finished.values()))
    with _writer(job, processor) as write:
        blocks = _cut(job, partial, wanted=lambda number: number not in finished)
        _write_all((block for block in blocks if block.number not in finished), write, job, partial, job.progress)
        if job.settings.kind == ShardKind.RL:
            _mend_tasks(job, partial, write)


def _cut(job: ShardJob, partial: PartialShards, *, wanted: Callable[[int], bool]) -> Iterator[Block]:
    # Less than a chunk file: records that hold their images would end each block with a file of one row.
    weight = job.settings.chunk_bytes * 9 // 10
    return cut_blocks(job.sources, partial.work, rows=job.settings.rows_per_block, weight=weight, wanted=wanted)


_Write = Callable[[Block], "Future[WrittenBlock]"]


@contextmanager
def _writer(job: ShardJob, processor: Any) -> Iterator[_Write]:
    """What writes a block, here or in another process."""
    images = [source.images for source in job.sources]
    if job.workers == 0:
        here = BlockWriter(job.settings, images, processor)

        def write(block: Block) -> "Future[WrittenBlock]":
            future: Future[WrittenBlock] = Future()
            future.set_result(here.write(block))
            return future

        yield write
        return
    # A process forked from one with threads may hang, and one that is spawned imports everything once more.
    context = multiprocessing.get_context("forkserver")
    with_processor = _PRELOADED_WITH_PROCESSOR if job.settings.processor is not None else []
    context.set_forkserver_preload(_PRELOADED + with_processor)
    stop = context.Event()
    pool = ProcessPoolExecutor(job.workers, context, start_process, (job.settings, images, stop))
    try:
        yield lambda block: pool.submit(write_block, block)
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write_all(
    blocks: Iterator[Block], write: _Write, job: ShardJob, partial: PartialShards, progress: Callable[[int], None]
) -> None:
    """Keep every process busy with one block waiting; more would only fill the disk."""
    running: dict[Future[WrittenBlock], Block] = {}
    for block in blocks:
        running[write(block)] = block
        if len(running) > job.workers:
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


def _mend_tasks(job: ShardJob, partial: PartialShards, write: _Write) -> None:
    """Write blocks again whose tasks repeat earlier ones, or have ids of others: only all together can tell."""
    duplicates, new_ids = _repeated(partial)
    affected = duplicates.keys() | new_ids.keys()
    if not affected:
        return
    blocks = _cut(job, partial, wanted=lambda number: number in affected)
    mended = (
        replace(block, duplicates=frozenset(duplicates[block.number]), new_ids=new_ids[block.number])
        for block in blocks
        if block.number in affected
    )
    _write_all(mended, write, job, partial, lambda rows: None)


def _repeated(partial: PartialShards) -> tuple[dict[int, set[int]], dict[int, dict[int, str]]]:
    """By block: places of tasks that ask what an earlier one asks, and new ids where an earlier one has the id."""
    duplicates: dict[int, set[int]] = defaultdict(set)
    new_ids: dict[int, dict[int, str]] = defaultdict(dict)
    contents: set[str] = set()
    own = {task_id for block in partial.blocks() for _, _, task_id in block.tasks}
    ids: set[str] = set()
    for block in partial.blocks():
        for place, content, task_id in block.tasks:
            if content in contents:
                duplicates[block.number].add(place)
                continue
            contents.add(content)
            if task_id in ids:
                number = 2
                while (new := f"{task_id}-{number}") in own:
                    number += 1
                own.add(new)
                new_ids[block.number][place] = new
            ids.add(task_id)
    return duplicates, new_ids


def _report(job: ShardJob, partial: PartialShards) -> DropReport:
    report = DropReport(str(job.out), limit=job.max_dropped)
    for block in partial.blocks():
        report.kept += len(block.digests)
        for reason, name in block.dropped:
            report.drop(DropReason(reason), name)
    report.check()
    return report


def _finish(
    job: ShardJob,
    processor: Any,
    partial: PartialShards,
    names: Sequence[str],
    made_from: Mapping[str, Any],
    report: DropReport,
) -> None:
    """All files beside the chunks; they are a function of the blocks and the job."""
    files: list[Mapping[str, Any]] = []
    digests: list[str] = []
    config: Mapping[str, Any] = {}
    rows: Counter[str] = Counter()
    stats = {name: CorpusStats() for name in names}
    for block in partial.blocks():
        files += block.files
        digests += block.digests
        config = _joined(config, block)
        rows[names[block.source]] += len(block.digests)
        stats[names[block.source]].merge(block.stats)
    folder = partial.rows
    runs = [[name, rows[name]] for name in names if rows[name]]
    chunks = WrittenChunks(files=files, config=config, digests=digests)
    write_index(folder, chunks, kind=job.settings.kind, sources=runs, made_from=made_from)
    _write_card(folder, job, stats, report, made_from["settings"])
    reader = ShardReader(folder, kind=job.settings.kind)
    if processor is not None:
        source = SampleSource(reader, processor, render_tools=job.settings.render_tools)
        tokens = [length for name in names for length in stats[name].tokens]
        write_lengths(lengths_file(folder, source), tokens)


def _joined(config: Mapping[str, Any], block: WrittenBlock) -> Mapping[str, Any]:
    if not config or not block.config or config == block.config:
        return config or block.config
    raise DataError(f"LitData describes the rows of block {block.number} otherwise than those before: {block.config}.")


def _write_card(
    folder: Path, job: ShardJob, stats: Mapping[str, CorpusStats], report: DropReport, settings: Mapping[str, Any]
) -> None:
    card = corpus_card(stats, report, kind=job.settings.kind, max_length=job.settings.max_length)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(card_page(card, settings), encoding="utf-8")
    units = {name: lengths_of(part) for name, part in stats.items()}
    unit = next((unit for unit, lengths in units.values() if lengths), "characters")
    lengths = [length for _, part in units.values() for length in part]
    (folder / "lengths.svg").write_text(lengths_figure(lengths, unit), encoding="utf-8")
