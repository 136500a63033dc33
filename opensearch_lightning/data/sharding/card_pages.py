"""The data card for people: a page of Markdown and a histogram of lengths."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from opensearch_lightning.data.sharding.card import QUANTILES

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 620, 300, 56, 16, 34, 44
_BARS = 40


def card_page(card: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The card as Markdown; beside it lies ``lengths.svg``."""
    parts = {"all": card["total"], **card["sources"]} if len(card["sources"]) > 1 else dict(card["sources"])
    lengths = card["total"]["lengths"]
    sections = [
        f"# Data card: {', '.join(card['sources'])}",
        f"{card['total']['rows']} rows ({card['kind']}) in shards of LitData, written by `opensearch shard`. "
        "`card.json` has the same figures, `shards.json` says what they were made from.",
        _rows_table(parts, card["kind"]),
        f"## Lengths ({lengths['unit']})\n\n![Histogram of lengths](lengths.svg)",
        _table(["source", *QUANTILES, *_extra(lengths)], [_length_cells(*item) for item in parts.items()]),
        *_calls(parts),
        _dropped(card["dropped"]),
        "## Settings\n\n" + _table(["setting", "value"], [[name, value] for name, value in settings.items()]),
    ]
    return "\n\n".join(sections) + "\n"


def lengths_figure(lengths: Sequence[int], unit: str) -> str:
    """A histogram as an SVG file; the longest hundredth shares the last bar, so that a few do not flatten the rest."""
    values = np.asarray(lengths or [0], dtype=np.int64)
    top = max(int(np.quantile(values, 0.99, method="higher")), int(values.min()) + 1)
    step = max(1, -(-top // _BARS))
    counts = np.bincount(np.minimum(values // step, top // step), minlength=top // step + 1)
    floor, width = _HEIGHT - _BOTTOM, (_WIDTH - _LEFT - _RIGHT) / len(counts)
    tall = (floor - _TOP) / max(int(counts.max()), 1)
    bars = [
        f'<rect x="{_LEFT + i * width:.1f}" y="{floor - tall * n:.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{tall * n:.1f}"><title>{_span(i, step, len(counts))}: {n}</title></rect>'
        for i, n in enumerate(counts.tolist())
    ]
    ticks = [
        f'<text x="{_LEFT + i * width:.1f}" y="{floor + 16}" text-anchor="middle">{i * step}</text>'
        for i in range(0, len(counts), max(1, len(counts) // 5))
    ]
    name = f"Rows by length ({unit})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(name)}" font-family="sans-serif" font-size="12">'
        f'<title>{escape(name)}</title><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
        f'<text x="{_LEFT}" y="20" fill="#5b6068">{escape(name)}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end" fill="#5b6068">{int(counts.max())}</text>'
        f'<g fill="#2457c5">{"".join(bars)}</g><g fill="#5b6068">{"".join(ticks)}</g>'
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}" stroke="#5b6068"/></svg>\n'
    )


def _span(bar: int, step: int, bars: int) -> str:
    return f"{bar * step} and more" if bar == bars - 1 else f"{bar * step} to {(bar + 1) * step - 1}"


def _rows_table(parts: Mapping[str, Any], kind: str) -> str:
    names = ["source", "rows", "images", "MB of images", "formats", "median pixels"]
    turns = ["turns", "tool turns", "tool turns a row"] if kind == "sft" else []
    rows = []
    for name, part in parts.items():
        images = part["images"]
        formats = ", ".join(f"{kind} {n}" for kind, n in images["formats"].items())
        cells = [name, part["rows"], images["number"], f"{images['bytes'] / 1e6:.1f}", formats]
        cells.append(images["pixels"].get("median", ""))
        rows.append([*cells, *([part["turns"], part["tool_turns"], part["tool_turns_per_row"]] if turns else [])])
    return _table([*names, *turns], rows)


def _extra(lengths: Mapping[str, Any]) -> list[str]:
    names = ["cannot be rendered"] if "not_renderable" in lengths else []
    return [*names, *(f"over {limit}" for limit in lengths.get("longer_than", {}))]


def _length_cells(name: str, part: Mapping[str, Any]) -> list[Any]:
    lengths = part["lengths"]
    lost = [lengths["not_renderable"]] if "not_renderable" in lengths else []
    return [name, *(lengths.get(q, "") for q in QUANTILES), *lost, *lengths.get("longer_than", {}).values()]


def _calls(parts: Mapping[str, Any]) -> list[str]:
    tools = sorted({tool for part in parts.values() for tool in part.get("calls", {})})
    if not tools:
        return []
    rows = [[tool, *(part["calls"].get(tool, 0) for part in parts.values())] for tool in tools]
    return ["## Calls by tool\n\n" + _table(["tool", *parts], rows)]


def _dropped(dropped: Mapping[str, Any]) -> str:
    if not dropped:
        return "## Dropped rows\n\nNone."
    rows = [[reason, of["rows"], ", ".join(of["first"])] for reason, of in dropped.items()]
    return "## Dropped rows\n\n" + _table(["reason", "rows", "first"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
