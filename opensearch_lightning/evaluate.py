"""Pass@1 of a policy on held-out tasks, in the environment that a configuration describes."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opensearch_lightning.composition import compose_config
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.evaluation import PassAt1, pass_at_1, roll_out
from opensearch_lightning.paths import check_file
from opensearch_lightning.types import Task, TrajectoryGroup

DECODINGS = {"greedy": "val_greedy", "sampled": "val_sampled"}
"""Name of a decoding, and the sampling settings of the rollout callback that it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch evaluate``."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    parser.add_argument("--shards", required=True, type=Path, help="folder of task shards")
    parser.add_argument("--limit", type=int, help="tasks from the front; all by default")
    parser.add_argument("--decoding", choices=[*DECODINGS], default="greedy")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")


def run(args: argparse.Namespace) -> int:
    """Carry out ``opensearch evaluate``; returns the exit code.

    Raises:
        OpenSearchError: an argument or the configuration cannot be used, or nothing could be measured.
    """
    from opensearch_lightning.rollout import check_room

    if args.limit is not None and args.limit < 1:
        raise ConfigurationError(f"--limit is {args.limit}; give the number of tasks, 1 or more, or leave it out")
    if args.out is not None:
        check_file("--out", args.out)
    tasks = read_tasks(args.shards, args.limit)
    config = compose_config(args.overrides)
    groups = evaluate(config, tasks, decoding=args.decoding)
    check_room(groups)
    figures = pass_at_1(groups)
    text = json.dumps(asdict(figures), indent=1, allow_nan=False)
    # First, so that the figures are not lost with a disk that is full.
    print(text)
    if args.out is not None:
        _write(args.out, text + "\n")
    return 0


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--out={out} cannot be written ({error.strerror}); the figures stand above"
        ) from error


def read_tasks(shards: Path, limit: int | None = None) -> list[Task]:
    """The tasks of a folder of RL shards, in order."""
    from opensearch_lightning.data import ShardKind, ShardReader
    from opensearch_lightning.data.rows import rl_task

    reader = ShardReader(shards, kind=ShardKind.RL)
    count = len(reader) if limit is None else min(limit, len(reader))
    return [rl_task(*reader[row]) for row in range(count)]


def evaluate(
    config: Mapping[str, Any], tasks: Sequence[Task], *, decoding: str = "greedy", policy: Any = None
) -> list[TrajectoryGroup]:
    """One scored trajectory of each task, by the rollout callback, tools and reward of ``config``.

    Args:
        config: a composed configuration of reinforcement learning.
        tasks: what to solve.
        decoding: ``"greedy"`` or ``"sampled"`` (at the training temperature).
        policy: a loaded policy to use in place of ``model.path``'s.

    Raises:
        ConfigurationError: the configuration has no rollouts, or an unknown decoding.
    """
    from opensearch_lightning.composition import make
    from opensearch_lightning.launch import build_shared
    from opensearch_lightning.models import full_weights
    from opensearch_lightning.types import Closable

    if decoding not in DECODINGS:
        raise ConfigurationError(f"decoding is {decoding!r}; choose one of {', '.join(DECODINGS)}")
    node = (config.get("callbacks") or {}).get("rollout_generation")
    if node is None:
        raise ConfigurationError(
            "this configuration has no rollouts; evaluate with experiment=quickstart_grpo or alike"
        )
    shared = build_shared(config, given={} if policy is None else {"policy": policy})
    generation = make("callbacks.rollout_generation", node, shared)
    shared["policy"].eval()
    generation.engine.update_weights(full_weights(shared["policy"]), 0)

    async def roll() -> list[TrajectoryGroup]:
        try:
            return await roll_out(generation.loop, tasks, generation.sampling[DECODINGS[decoding]])
        finally:
            for part in (shared["executor"], shared.get("reward"), shared["engine"]):
                if isinstance(part, Closable):
                    await part.aclose()

    return asyncio.run(roll())


def summary_cell(figures: PassAt1) -> str:
    """``"61.5 ± 3.4"``: accuracy and standard error in points."""
    return f"{100 * figures.accuracy:.1f} ± {100 * figures.stderr:.1f}"
