"""Static figures as SVG text: lines with bands, and histograms. They need no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 620, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 34, 40
_COLOURS = ("#b3440f", "#96700b", "#1f8a5b", "#2457c5")
_DASHES = ("7 4", "4 2", "9 3 2 3", "none")

STYLE = """
svg.figure { font: 12px system-ui, "DejaVu Sans", sans-serif; max-width: 100%; height: auto; }
svg.figure text { fill: #5b6068; }
svg.figure .ground { fill: #ffffff; }
svg.figure .grid { stroke: #e3e5e8; }
svg.figure .axis { stroke: #5b6068; }
@media (prefers-color-scheme: dark) {
  svg.figure text { fill: #b3b8bf; }
  svg.figure .ground { fill: #1b1d21; }
  svg.figure .grid { stroke: #33373d; }
}
"""
"""Of pages that hold these figures, and of the files of figures themselves."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points ``(x, y)`` with a band from ``low`` to ``high`` around them."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Heights between the edges of a histogram, one fewer than there are edges."""

    label: str
    heights: Sequence[float]


def line_figure(title: str, lines: Sequence[Line], *, x_label: str, percent: bool = False) -> str:
    """Lines over a common axis, at most four of them."""
    values = [value for line in lines for value in (*line.low, *line.high)]
    low, high = min(values), max(values)
    x_ticks = _ticks(min(x for line in lines for x in line.x), max(x for line in lines for x in line.x), 6)
    axes = _Axes(title=title, x_ticks=x_ticks, y_ticks=_ticks(low, high, 5), x_label=x_label, percent=percent)
    body = []
    for line, colour in zip(lines, _COLOURS, strict=False):
        band = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
        body.append(f'<polygon points="{axes.points(band)}" fill="{colour}" fill-opacity="0.13"/>')
    for line, colour, dash in zip(lines, _COLOURS, _DASHES, strict=False):
        points = axes.points([*zip(line.x, line.y, strict=True)])
        body.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
    legend = [(line.label, colour, dash) for line, colour, dash in zip(lines, _COLOURS, _DASHES, strict=False)]
    return axes.figure(body, legend)


def histogram_figure(title: str, edges: Sequence[float], bars: Sequence[Bars], *, x_label: str) -> str:
    """Outlined histograms over each other, two of them; heights are shares of all values of a kind."""
    high = max(height for kind in bars for height in kind.heights)
    x_ticks = _ticks(edges[0], edges[-1], 6)
    axes = _Axes(title=title, x_ticks=x_ticks, y_ticks=_ticks(0, high, 5), x_label=x_label, percent=True)
    colours = (_COLOURS[0], _COLOURS[3])
    body = []
    for kind, colour in zip(bars, colours, strict=True):
        outline = [(edges[0], 0.0)]
        for left, right, height in zip(edges, edges[1:], kind.heights, strict=False):
            outline += [(left, height), (right, height)]
        outline.append((edges[-1], 0.0))
        points = axes.points(outline)
        body.append(
            f'<polygon points="{points}" fill="{colour}" fill-opacity="0.22" stroke="{colour}" stroke-width="1.6"/>'
        )
    return axes.figure(body, [(kind.label, colour, "none") for kind, colour in zip(bars, colours, strict=True)])


def as_file(figure: str) -> str:
    """A figure that carries its own style, as an SVG file."""
    head, _, rest = figure.partition(">")
    return f"{head}><style>{STYLE}</style>{rest}\n"


@dataclass(frozen=True, kw_only=True)
class _Axes:
    title: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_label: str
    percent: bool

    def points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)

    @property
    def _x(self) -> Callable[[float], float]:
        return _between(self.x_ticks[0], self.x_ticks[-1], _LEFT, WIDTH - _RIGHT)

    @property
    def _y(self) -> Callable[[float], float]:
        return _between(self.y_ticks[0], self.y_ticks[-1], HEIGHT - _BOTTOM, _TOP)

    def figure(self, body: Sequence[str], legend: Sequence[tuple[str, str, str]]) -> str:
        floor, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = [f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>']
        for tick in self.y_ticks:
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{self._shown(tick)}</text>')
        for tick in self.x_ticks:
            x = self._x(tick)
            parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
        parts.append(
            f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        parts += body
        x = float(_LEFT)
        for label, colour, dash in legend:
            parts.append(
                f'<line x1="{x:.0f}" x2="{x + 24:.0f}" y1="16" y2="16" stroke="{colour}" stroke-width="2.5" '
                f'stroke-dasharray="{dash}"/><text x="{x + 30:.0f}" y="20">{escape(label)}</text>'
            )
            x += 48 + 6.6 * len(label)
        return (
            f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="{escape(self.title)}"><title>{escape(self.title)}</title>'
            f"{''.join(parts)}</svg>"
        )

    def _shown(self, tick: float) -> str:
        return f"{100 * tick:.3g}%" if self.percent else f"{tick:.3g}"


def _between(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]
