"""The ``opensearch world`` command."""

from __future__ import annotations

import argparse
import time

from opensearch_lightning.world.build import build_world
from opensearch_lightning.world.settings import DEFAULT_SPLITS
from opensearch_lightning.world.store import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("out", help="directory to write the world to")
    parser.add_argument("--pages", type=int, default=150, help="entities, each with a page and an emblem (150)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and settings give the same world (0)")
    for split, size in DEFAULT_SPLITS.items():
        parser.add_argument(f"--{split}", type=int, default=size, help=f"number of {split} tasks ({size})")
    parser.add_argument("--workers", type=int, default=2, help="threads that draw and check pictures (2)")
    parser.add_argument("--force", action="store_true", help="replace a world that is already there")


def run(args: argparse.Namespace) -> int:
    """Build the world and print what is in it; 0 on success.

    Raises:
        OpenSearchError: as :func:`opensearch_lightning.world.build_world`.
    """
    start = time.perf_counter()
    world = build_world(
        args.out,
        pages=args.pages,
        seed=args.seed,
        splits={split: getattr(args, split) for split in DEFAULT_SPLITS},
        workers=args.workers,
        force=args.force,
    )
    print(summary(world))
    print(f"built in {time.perf_counter() - start:.1f} s")
    return 0


def summary(world: World) -> str:
    """A short table: tasks by split and picture kind, pages, fingerprint."""
    tasks, pictures = world.manifest["tasks"], world.manifest["pictures"]
    lines = [f"{world.path}: {world.manifest['documents']} pages, fingerprint {world.fingerprint[:12]}"]
    lines.append("".join(f"{head:>10}" for head in ("split", "tasks", *pictures)))
    for split, size in world.splits.items():
        cells = (split, size, *(tasks[split].get(kind, 0) for kind in pictures))
        lines.append("".join(f"{cell:>10}" for cell in cells))
    lines.append("".join(f"{cell:>10}" for cell in ("pictures", sum(pictures.values()), *pictures.values())))
    return "\n".join(lines)
