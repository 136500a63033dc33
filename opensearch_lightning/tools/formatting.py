"""How results read to the policy: compact, one result a line."""

from __future__ import annotations

from collections.abc import Iterable

from opensearch_lightning.errors import one_line

NO_RESULTS = "No results."

# Titles and addresses come from outside; summaries are shortened by who writes them.
_MOST_TITLE, _MOST_URL, _MOST_SUMMARY = 300, 2000, 4000


def passages(results: Iterable[tuple[str, str, str]]) -> str:
    """``(title, url, summary)`` as ``1. title (url): summary`` lines; says so when there are none."""
    lines = [
        f"{i}. {_cut(title, _MOST_TITLE)} ({_cut(url, _MOST_URL)}): {_cut(summary, _MOST_SUMMARY)}"
        for i, (title, url, summary) in enumerate(results, start=1)
    ]
    return "\n".join(lines) or NO_RESULTS


def sources(results: Iterable[tuple[str, str]]) -> str:
    """``(title, url)`` as ``1. title (url)`` lines; says so when there are none."""
    lines = [f"{i}. {_cut(t, _MOST_TITLE)} ({_cut(u, _MOST_URL)})" for i, (t, u) in enumerate(results, start=1)]
    return "\n".join(lines) or NO_RESULTS


def encodable(text: str) -> str:
    """``text`` with a question mark for every half of a surrogate pair, which no tokenizer, file or request takes."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str, most: int) -> str:
    line = one_line(text)
    return line if len(line) <= most else line[: most - 3].rstrip() + "..."
