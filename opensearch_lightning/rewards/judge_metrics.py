"""What a model judge did and cost since it was last asked."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from opensearch_lightning.errors import ConfigurationError

_MILLION = 1_000_000


class JudgeFailure(StrEnum):
    """Why a judgement failed: the server's failures first, then answers that are no judgement."""

    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    UNREACHABLE = "unreachable"
    BACKEND_ERROR = "backend_error"
    REFUSED = "refused"
    CUT = "cut"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one request, as the server counted them."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class TokenPrice:
    """Prices of a million tokens, in any one currency.

    Raises:
        ConfigurationError: a price below 0.
    """

    input: float
    output: float

    def __post_init__(self) -> None:
        """Check the values."""
        if not (0 <= self.input < math.inf and 0 <= self.output < math.inf):
            raise ConfigurationError(
                f"prices of a million tokens are {self.input} and {self.output}: set both to 0 or more."
            )

    def cost(self, usage: Usage) -> float:
        """Cost of one request."""
        return (usage.input_tokens * self.input + usage.output_tokens * self.output) / _MILLION


@dataclass(frozen=True, kw_only=True)
class JudgeMetrics:
    """One judge over a stretch of time.

    ``calls`` are judgements asked for; ``cache_hits`` of them needed no request of their own, because the cache knew
    them or an equal one was on its way. ``requests`` went to the server, ``retries`` of them again after its failure;
    ``unreadable`` answers were no judgement and asked for again while the judge may. ``failures`` holds only kinds that
    occurred, one for each judgement that was asked of the model and failed. Tokens and ``cost`` are of all answers,
    unreadable ones too; ``cost`` is ``None`` without a price. Latencies are seconds of judgements asked of the model,
    failed ones and waits included; ``None`` without any.
    """

    calls: int = 0
    cache_hits: int = 0
    requests: int = 0
    retries: int = 0
    unreadable: int = 0
    failures: Mapping[JudgeFailure, int] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None


class JudgeRecorder:
    """Counts for :class:`JudgeMetrics`. Safe to share by threads."""

    def __init__(self, price: TokenPrice | None) -> None:
        self._price = price
        self._lock = threading.Lock()
        self._start_anew()

    def asked(self) -> None:
        """A judgement is asked for."""
        self._count("calls")

    def reused(self) -> None:
        """A judgement needed no request of its own."""
        self._count("cache_hits")

    def requested(self, *, retry: bool) -> None:
        """A request goes to the server."""
        self._count("requests")
        if retry:
            self._count("retries")

    def answered(self, usage: Usage | None) -> None:
        """The server answered, and told its tokens if ``usage`` is given."""
        if usage is None:
            return
        with self._lock:
            self._counts["input_tokens"] += usage.input_tokens
            self._counts["output_tokens"] += usage.output_tokens
            self._cost += self._price.cost(usage) if self._price is not None else 0.0

    def unreadable(self) -> None:
        """An answer was no judgement."""
        self._count("unreadable")

    def ended(self, seconds: float, failure: JudgeFailure | None) -> None:
        """A judgement that was asked of the model has ended."""
        with self._lock:
            self._latencies.append(seconds)
            if failure is not None:
                self._failures[failure] += 1

    def drain(self) -> JudgeMetrics:
        """What was counted since this was last called."""
        with self._lock:
            counts, failures, cost, latencies = self._counts, self._failures, self._cost, self._latencies
            self._start_anew()
        median, high = np.percentile(latencies, [50, 95]).tolist() if latencies else (None, None)
        return JudgeMetrics(
            **counts,
            failures=dict(failures),
            cost=None if self._price is None else cost,
            latency_p50_s=median,
            latency_p95_s=high,
        )

    def _start_anew(self) -> None:
        self._counts: Counter[str] = Counter()
        self._failures: Counter[JudgeFailure] = Counter()
        self._cost = 0.0
        self._latencies: list[float] = []

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1
