"""Sources to shards in parallel: the same files whatever the number of processes, and however often interrupted."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReason, DropReport, checked_max_dropped
from opensearch_lightning.data.sharding.blocks import Block, cut_blocks
from opensearch_lightning.data.sharding.finish import write_beside_chunks
from opensearch_lightning.data.sharding.processes import WriteBlock, block_writer, write_all
from opensearch_lightning.data.sharding.repeats import find_repeats
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.sharding.state import PartialShards, check_complete
from opensearch_lightning.data.shards import META, ShardKind, ShardReader
from opensearch_lightning.data.sources import Source
from opensearch_lightning.errors import ConfigurationError, DataError


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
        DataError: too many rows cannot be used; a source changed; the disk is full; the folder is there and holds no
            shards, or damaged ones. What is finished is kept for the next try, and what is there stays as it is.
        ConfigurationError: settings changed since the work began, or the folder is in use, or holds a source.
    """
    processor = job.settings.load_processor()
    names = distinct_names(job.sources)
    stamps = _stamps(job)
    made_from = {
        "settings": job.settings.as_json(processor),
        "order": names,
        "sources": {name: source.fingerprint() for name, source in zip(names, job.sources, strict=True)},
    }
    _check_apart(job)
    if job.out.exists():
        meta = _meta(job.out)
        if not job.fresh:
            check_complete(job.out, made_from, meta)
            _check_whole(job)
            return None
    with _writing(job.out), PartialShards(job.out, made_from, fresh=job.fresh) as partial:
        _write_blocks(job, processor, partial)
        if changed := [path for path, stamp in _stamps(job).items() if stamps.get(path) != stamp]:
            raise DataError(
                f"{changed[0]} changed while it was read: let what writes it finish, then run the same command again "
                "with --fresh."
            )
        report = _report(job, partial)
        write_beside_chunks(
            partial, report, names=names, settings=job.settings, processor=processor, made_from=made_from
        )
        partial.publish()
    return report


def _check_apart(job: ShardJob) -> None:
    """See that making the folder anew would remove nothing that the rows are made from.

    Raises:
        ConfigurationError: a source lies in it.
    """
    out = job.out.resolve()
    for source in job.sources:
        for path in (*source.files, *source.images.paths):
            if path.resolve().is_relative_to(out):
                raise ConfigurationError(f"{path} of the sources lies in {job.out}, the folder to make; name another")


def _stamps(job: ShardJob) -> dict[Path, tuple[int, int]]:
    """Size and time of change of the files that the job's description tells the content of."""
    stamps = {}
    for source in job.sources:
        for path in (*source.files, *(path for path in source.images.paths if path.is_file())):
            try:
                state = path.stat()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}.") from error
            stamps[path] = state.st_size, state.st_mtime_ns
    return stamps


def _check_whole(job: ShardJob) -> None:
    try:
        ShardReader(job.out, kind=job.settings.kind)
    except DataError as error:
        raise DataError(f"{error} Add --fresh to replace it when the new ones are complete.") from error


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
        meta = json.loads((out / META).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{out} exists already and holds no shards; name another folder, or remove it.") from error
    return meta if isinstance(meta, dict) else {}


def _write_blocks(job: ShardJob, processor: Any, partial: PartialShards) -> None:
    finished = partial.finished()
    job.progress(sum(finished.values()))
    images = [source.images for source in job.sources]
    with block_writer(job.settings, images, processor, workers=job.workers) as write:
        blocks = _cut(job, partial, wanted=lambda number: number not in finished)
        unfinished = (block for block in blocks if block.number not in finished)
        write_all(unfinished, write, partial, workers=job.workers, progress=job.progress)
        if job.settings.kind == ShardKind.RL:
            _mend_tasks(job, partial, write)


def _cut(job: ShardJob, partial: PartialShards, *, wanted: Callable[[int], bool]) -> Iterator[Block]:
    # Less than a chunk file: records that hold their images would end each block with a file of one row.
    weight = job.settings.chunk_bytes * 9 // 10
    return cut_blocks(job.sources, partial.work_folder, rows=job.settings.rows_per_block, weight=weight, wanted=wanted)


def _mend_tasks(job: ShardJob, partial: PartialShards, write: WriteBlock) -> None:
    """Write blocks again whose tasks repeat earlier ones, or have ids of others: only all together can tell."""
    duplicates, new_ids = find_repeats(partial.blocks())
    affected = duplicates.keys() | new_ids.keys()
    if not affected:
        return
    blocks = _cut(job, partial, wanted=lambda number: number in affected)
    mended = (
        replace(block, duplicates=frozenset(duplicates[block.number]), new_ids=new_ids[block.number])
        for block in blocks
        if block.number in affected
    )
    write_all(mended, write, partial, workers=job.workers)


def _report(job: ShardJob, partial: PartialShards) -> DropReport:
    report = DropReport(str(job.out), limit=job.max_dropped)
    for block in partial.blocks():
        report.kept += len(block.digests)
        for reason, name in block.dropped:
            report.drop(DropReason(reason), name)
    report.check()
    return report
