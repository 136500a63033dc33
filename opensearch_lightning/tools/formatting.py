"""How results read to the policy: compact, one result a line."""

from __future__ import annotations

from collections.abc import Iterable

from opensearch_lightning.errors import one_line

NO_RESULTS = "No results."


def passages(results: Iterable[tuple[str, str, str]]) -> str:
    """``(title, url, summary)`` as ``1. title (url): summary`` lines; says so when there are none."""
    lines = [f"{i}. {one_line(t)} ({one_line(u)}): {one_line(s)}" for i, (t, u, s) in enumerate(results, start=1)]
    return "\n".join(lines) or NO_RESULTS


def sources(results: Iterable[tuple[str, str]]) -> str:
    """``(title, url)`` as ``1. title (url)`` lines; says so when there are none."""
    lines = [f"{i}. {one_line(title)} ({one_line(url)})" for i, (title, url) in enumerate(results, start=1)]
    return "\n".join(lines) or NO_RESULTS
