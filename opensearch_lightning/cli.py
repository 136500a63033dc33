"""The ``opensearch`` command: each subcommand is a late import of the part that does the work."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from opensearch_lightning import __version__
from opensearch_lightning.errors import ConfigurationError, OpenSearchError

COMMANDS = {
    "quickstart": ("opensearch_lightning.quickstart", "make a world, train a tiny agent in it, report"),
    "ablation": ("opensearch_lightning.ablation", "train the four arms of the paper's ablation, compare them"),
    "shard": ("opensearch_lightning.data.sharding.cli", "make training shards of record files, with a data card"),
    "measure": ("opensearch_lightning.data.sharding.measure_cli", "count the tokens of shards under a processor"),
    "train": ("opensearch_lightning.launch", "make one training run, as the configuration describes it"),
    "plan": ("opensearch_lightning.planning.cli", "tell what a run will need: parameters, memory, time"),
    "world": ("opensearch_lightning.world.cli", "generate a small encyclopedia with pictures and tasks"),
    "evaluate": ("opensearch_lightning.evaluate", "measure a policy on held-out tasks"),
    "tools": ("opensearch_lightning.tools_command", "try each configured tool and its services once"),
    "export": ("opensearch_lightning.export", "make a policy of a checkpoint written under DeepSpeed"),
    "report": ("opensearch_lightning.dashboards.cli", "write one page about runs: curves, evaluation, trajectories"),
}
"""Subcommand: the module with ``add_arguments(parser)`` and ``run(args) -> int``, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the ``opensearch`` command; what the caller can mend is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0].startswith("-"):
            return _general(arguments)
        return _subcommand(arguments[0], arguments[1:])
    except OpenSearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _general(arguments: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="opensearch",
        usage="opensearch COMMAND …",
        description="Train multimodal deep-search agents.",
        epilog="\n".join(["commands (each has its own --help):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def _subcommand(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        near = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"there is no command {name!r}{near}; choose one of: {', '.join(COMMANDS)}")
    place, summary = COMMANDS[name]
    module = importlib.import_module(place)
    parser = argparse.ArgumentParser(prog=f"opensearch {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.add_arguments(parser)
    code: int = module.run(parser.parse_intermixed_args(arguments))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
