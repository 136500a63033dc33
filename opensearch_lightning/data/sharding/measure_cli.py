"""The ``opensearch measure`` command."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from opensearch_lightning.data.lengths import lengths_file, measure
from opensearch_lightning.data.loader import check_counts
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.shards import ShardKind, ShardReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("shards", type=Path, help="folder of expert trajectories, made by `opensearch shard`")
    parser.add_argument("--processor", type=Path, required=True, help="folder of the policy to be trained")
    parser.add_argument("--max-pixels", type=int, help="largest picture that the processor shows the policy")
    parser.add_argument("--no-tools", action="store_true", help="without tool schemas in the system turn")
    parser.add_argument("--workers", type=int, default=0, help="processes that count; 0: none besides this (0)")


def run(args: argparse.Namespace) -> int:
    """Count the tokens of each row and keep the counts in the folder; 0 on success.

    Raises:
        OpenSearchError: the shards or the processor cannot be used.
    """
    check_counts(0, workers=args.workers)
    settings = ShardSettings(kind=ShardKind.SFT, processor=args.processor, max_pixels=args.max_pixels)
    reader = ShardReader(args.shards, kind=ShardKind.SFT)
    source = SampleSource(reader, settings.load_processor(), render_tools=not args.no_tools)
    path = lengths_file(args.shards, source)
    known = path.exists()
    lengths = measure(source, num_workers=args.workers, folder=args.shards)
    usable = lengths[lengths >= 0]
    longest = f", the longest of {int(np.max(usable))} tokens" if len(usable) else ""
    print(f"{len(lengths)} rows{longest}; {len(lengths) - len(usable)} cannot be rendered")
    print(f"{path} was there already" if known else f"done: {path}")
    return 0
