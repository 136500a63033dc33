"""Counts and latencies per tool since the last reset."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from opensearch_lightning.types import ErrorKind, ToolResult

NO_TOOL = "no_tool"
"""Name under which calls are counted that name no known tool."""


@dataclass(frozen=True, kw_only=True)
class ToolMetrics:
    """One tool since the last reset.

    ``errors`` holds only kinds that occurred; ``injected`` of them were made by fault injection. Latencies are seconds
    of the calls that reached the tool (neither refused, injected nor cached), waiting for a turn included; ``None``
    without any.
    """

    calls: int = 0
    errors: Mapping[ErrorKind, int] = field(default_factory=dict)
    injected: int = 0
    cache_hits: int = 0
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExecutorMetrics:
    """Every tool by wire name, those without calls too, and calls that named none under :data:`NO_TOOL`."""

    tools: Mapping[str, ToolMetrics]

    @property
    def calls(self) -> int:
        """Calls in all."""
        return sum(tool.calls for tool in self.tools.values())

    @property
    def errors(self) -> int:
        """Errors in all."""
        return sum(sum(tool.errors.values()) for tool in self.tools.values())


@dataclass
class _Counts:
    calls: int = 0
    errors: Counter[ErrorKind] = field(default_factory=Counter)
    injected: int = 0
    cache_hits: int = 0
    latencies: list[float] = field(default_factory=list)

    def snapshot(self) -> ToolMetrics:
        quantiles = np.percentile(self.latencies, [50, 95]).tolist() if self.latencies else (None, None)
        return ToolMetrics(
            calls=self.calls,
            errors=dict(self.errors),
            injected=self.injected,
            cache_hits=self.cache_hits,
            latency_p50_s=quantiles[0],
            latency_p95_s=quantiles[1],
        )


class MetricsRecorder:
    """Counts results. Safe to share by threads."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)

    def record(self, result: ToolResult, *, reached_tool: bool) -> None:
        """Count one result; ``reached_tool``: its latency is the tool's."""
        with self._lock:
            counts = self._counts[result.tool or NO_TOOL]
            counts.calls += 1
            counts.injected += result.injected
            counts.cache_hits += result.cached
            if result.error is not None:
                counts.errors[result.error] += 1
            if reached_tool:
                counts.latencies.append(result.latency_s)

    def snapshot(self) -> ExecutorMetrics:
        """What was counted since the last reset."""
        with self._lock:
            named = {name: self._counts[name].snapshot() for name in (*self._names, NO_TOOL)}
        return ExecutorMetrics(tools=named)

    def reset(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._counts.clear()
