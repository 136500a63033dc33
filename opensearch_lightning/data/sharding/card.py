"""The data card of a folder of shards: what is in it, by source, as JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from opensearch_lightning.data.drops import DropReport
from opensearch_lightning.data.sharding.card_stats import CorpusStats
from opensearch_lightning.data.shards import ShardKind

QUANTILES = {"least": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99, "most": 1.0}
_NAMED = 5


def corpus_card(
    by_source: Mapping[str, CorpusStats], report: DropReport, *, kind: ShardKind, max_length: int | None
) -> dict[str, Any]:
    """The card of a corpus.

    Args:
        by_source: what each source holds; the order is kept.
        report: what was dropped.
        kind: what the rows are.
        max_length: longest row that training will take, if it is to be said how many are longer.

    Returns:
        JSON-able: ``kind``; ``total`` and ``sources`` with the counts; ``dropped`` by reason.
    """
    total = CorpusStats()
    for stats in by_source.values():
        total.merge(stats.to_json())
    return {
        "kind": str(kind),
        "total": _part(total, kind, max_length),
        "sources": {name: _part(stats, kind, max_length) for name, stats in by_source.items()},
        "dropped": {
            str(reason): {"rows": len(names), "first": names[:_NAMED]}
            for reason, names in sorted(report.dropped.items())
        },
    }


def lengths_of(stats: CorpusStats) -> tuple[str, Sequence[int]]:
    """The unit of lengths and the length of each row that can be rendered."""
    if stats.tokens:
        return "tokens", [length for length in stats.tokens if length >= 0]
    return "characters", stats.characters


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """Values of the list itself: the least one that at least that share of the list does not exceed."""
    if not values:
        return {}
    ordered = sorted(values)
    return {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in QUANTILES.items()}


def _part(stats: CorpusStats, kind: ShardKind, max_length: int | None) -> dict[str, Any]:
    unit, lengths = lengths_of(stats)
    part: dict[str, Any] = {"rows": stats.rows}
    if kind == ShardKind.SFT:
        part |= {
            "turns": stats.turns,
            "policy_turns": stats.policy_turns,
            "tool_turns": stats.tool_turns,
            "tool_turns_per_row": round(stats.tool_turns / stats.rows, 3) if stats.rows else 0.0,
            "calls": dict(sorted(stats.calls.items())),
        }
    part["images"] = {
        "number": sum(stats.formats.values()),
        "bytes": stats.image_bytes,
        "formats": dict(sorted(stats.formats.items())),
        "pixels": quantiles(stats.pixels),
    }
    part["lengths"] = {"unit": unit, "sum": sum(lengths), **quantiles(lengths)}
    if stats.tokens:
        part["lengths"]["not_renderable"] = len(stats.tokens) - len(lengths)
    if max_length is not None:
        part["lengths"]["longer_than"] = {str(max_length): sum(length > max_length for length in lengths)}
    return part
