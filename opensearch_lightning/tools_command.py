"""``opensearch tools check``: which of the configured tools work, before a run depends on them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from opensearch_lightning.composition import compose_config, make
from opensearch_lightning.errors import ConfigurationError, OpenSearchError
from opensearch_lightning.tools import Tool
from opensearch_lightning.tools.check import Check, Status, check_tools, render
from opensearch_lightning.tools.executor import flat
from opensearch_lightning.tools.secrets import MissingKeyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch tools``."""
    parser.add_argument("action", choices=["check"], help="check: try each tool and its services once")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training: tools=online …")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with configuration groups of your own")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="wait for an answer (%(default)s)"
    )
    parser.add_argument("--slow", type=float, default=5.0, metavar="SECONDS", help="what counts as slow (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a table; returns 1 when a tool or service is broken.

    Raises:
        OpenSearchError: the configuration cannot be read, or has no tools.
    """
    if not (args.timeout > 0 and args.slow > 0):
        raise ConfigurationError(f"--timeout is {args.timeout}, --slow {args.slow}: give seconds above 0")
    config = compose_config(args.overrides, extra_dir=args.config_dir)
    executor = (config.get("tools") or {}).get("executor") or {}
    places = executor.get("tools")
    if str(executor.get("_target_", "")).endswith(".replaying"):
        raise ConfigurationError("a replay reaches no tool, there is nothing to try; take the tools that were recorded")
    if not places:
        raise ConfigurationError("this configuration has no tools; add tools=offline, tools=online or an experiment=…")
    tools: list[Tool] = []
    failed: list[Check] = []
    for name, node in _nodes(places):
        try:
            built = make(name, node, {})
        except MissingKeyError as error:
            failed.append(_not_built(name, Status.MISSING_KEY, error))
        except OpenSearchError as error:
            failed.append(_not_built(name, Status.FAILED, error))
        else:
            tools += flat([built])
    checks = [*asyncio.run(check_tools(tools, timeout_s=args.timeout, slow_s=args.slow)), *failed]
    print(render(checks))
    return int(any(check.is_broken for check in checks))


def _nodes(places: Any) -> Iterator[tuple[str, Any]]:
    name = "tools.executor.tools"
    if isinstance(places, Mapping) and "_target_" not in places:
        yield from ((f"{name}.{place}", node) for place, node in places.items() if node is not None)
    elif isinstance(places, list):
        yield from ((f"{name}[{i}]", node) for i, node in enumerate(places))
    else:
        yield name, places


def _not_built(name: str, status: Status, error: OpenSearchError) -> Check:
    return Check(tool=name.rpartition(".")[2], service="", status=status, detail=str(error))
