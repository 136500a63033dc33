"""The ``opensearch shard`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from opensearch_lightning.data.sharding.job import ShardJob, shard
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.sharding.state import finished_blocks
from opensearch_lightning.data.shards import ShardKind
from opensearch_lightning.data.sources import Source, open_source
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.paths import check_folder

_POLICY_SPEAKERS = ("gpt", "assistant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        type=Path,
        metavar="SRC… OUT",
        help="record files or folders of them; then the folder to make",
    )
    add(
        "--kind",
        choices=[str(kind) for kind in ShardKind],
        help="what the records are (told by the first of each source)",
    )
    add("--images", type=Path, help="folder or zip file of the images (looked for beside the records)")
    add("--allow-urls", action="store_true", help="fetch images that records give by URL")
    add("--processor", type=Path, help="folder of a policy: count each row's tokens, for training to start at once")
    add("--max-pixels", type=int, help="largest picture that the processor shows the policy (as its files say)")
    add("--no-tools", action="store_true", help="count without tool schemas in the system turn (render_tools=false)")
    add("--max-length", type=int, help="the card says how many rows have more tokens")
    add("--max-dropped", type=float, default=0.01, help="largest fraction of unusable rows to accept (0.01)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: none besides this (one a core)")
    add("--chunk-mb", type=int, default=64, help="size of a file of rows (64)")
    add("--rows-per-block", type=int, default=256, help="most rows of a piece of work, and of a file (256)")
    add(
        "--fresh",
        action="store_true",
        help="begin anew; shards that are there are replaced once the new ones are whole",
    )


def run(args: argparse.Namespace) -> int:
    """Make the shards, or go on making them; 0 on success.

    Raises:
        OpenSearchError: as :func:`opensearch_lightning.data.sharding.job.shard` and
            :func:`opensearch_lightning.data.sources.open_source`.
    """
    *paths, out = args.paths
    if not paths:
        raise ConfigurationError(f"got {out} alone: name one source or more, and then the folder to make")
    places = [path.resolve() for path in paths]
    if twice := [path for path, place in zip(paths, places, strict=True) if places.count(place) > 1]:
        raise ConfigurationError(f"{twice[-1]} is named twice; name each source once, and weigh sources in training")
    check_folder("the folder to make", out)
    sources = [open_source(path, images=args.images, allow_urls=args.allow_urls) for path in paths]
    kind = ShardKind(args.kind) if args.kind else guess_kind(sources)
    # a file that takes the output gets a line's worth now and then, a terminal sees it move
    interval = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(unit=" rows", file=sys.stderr, dynamic_ncols=True, mininterval=interval) as bar:
        job = ShardJob(
            sources=sources,
            out=out,
            settings=_settings(args, kind),
            max_dropped=args.max_dropped,
            workers=args.workers,
            fresh=args.fresh,
            progress=_Progress(bar),
        )
        try:
            report = shard(job)
        except KeyboardInterrupt:
            bar.close()
            kept = sum(finished_blocks(out).values())
            print(f"{kept} rows are done and kept; run the same command again to go on", file=sys.stderr)
            raise
    if report is None:
        print(f"{out} is up to date: made from the same records with the same settings")
        return 0
    print(report)
    print(f"done: {report.kept} rows in {out}; {out / 'README.md'} says what they hold")
    return 0


def guess_kind(sources: Sequence[Source]) -> ShardKind:
    """Tell the kind of all sources by the first record of each: one with turns of a policy is a trajectory.

    Raises:
        DataError: a source holds no record, or they are of two kinds.
    """
    kinds = {source.name: _kind_of_first(source) for source in sources}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise DataError(f"the sources hold rows of two kinds ({told}); shard them apart, or give --kind.")
    return next(iter(kinds.values()))


def _kind_of_first(source: Source) -> ShardKind:
    first = next(iter(source.records()), None)
    if first is None:
        raise DataError(f"{source.name} holds no record.")
    record: Any = first[1]
    if not isinstance(record, Mapping):
        raise DataError(f"{first[0]} is a {type(record).__name__}, not an object; say what the records are by --kind.")
    turns = record.get("conversations") or record.get("messages")
    spoken = isinstance(turns, list) and any(
        isinstance(turn, Mapping) and (turn.get("from") or turn.get("role")) in _POLICY_SPEAKERS for turn in turns
    )
    return ShardKind.SFT if spoken else ShardKind.RL


def _settings(args: argparse.Namespace, kind: ShardKind) -> ShardSettings:
    return ShardSettings(
        kind=kind,
        processor=args.processor,
        max_pixels=args.max_pixels,
        render_tools=not args.no_tools,
        max_length=args.max_length,
        chunk_bytes=args.chunk_mb * 2**20,
        rows_per_block=args.rows_per_block,
    )


class _Progress:
    """Shows the records done; what an earlier run did counts in no rate."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._begun = False

    def __call__(self, rows: int) -> None:
        if self._begun:
            self._bar.update(rows)
            return
        self._begun = True
        if rows:
            self._bar.write(f"{rows} rows are there already from an earlier run", file=sys.stderr)
            self._bar.initial = self._bar.n = rows
            self._bar.refresh()
