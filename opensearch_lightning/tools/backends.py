"""How a backend is treated: its turns and its rate, what is tried again, and when it is left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.types import INFRASTRUCTURE_ERRORS, ErrorKind

T = TypeVar("T")
Attempt = Callable[[float], Awaitable[T]]
"""One try of a call, given the seconds it may take."""


def is_seconds(value: object) -> bool:
    """Whether ``value`` is a number above 0 that a clock reaches."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_count(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, kw_only=True)
class BackendPolicy:
    """What calls of one backend may cost it and the rollouts.

    Attributes:
        timeout_s: seconds of a call, retries and the waits between them included, waits for a turn not; ``None`` takes
            the executor's.
        max_concurrency: calls at once, besides what its tools say; ``None`` for no limit of its own.
        calls_per_s: starts of calls in a second, evenly spaced; ``None`` for no limit.
        retries: further tries after an error of the infrastructure; the policy's own errors are never tried again.
        backoff_s: mean wait before the first retry; it doubles with each, and varies by half either way. A
            ``Retry-After`` of the backend that is longer is kept.
        breaker_failures: calls in a row that failed for the infrastructure, after which no call is made for
            ``breaker_s``; then a single one tries. ``None`` for off.
        breaker_s: see there.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    timeout_s: float | None = None
    max_concurrency: int | None = None
    calls_per_s: float | None = None
    retries: int = 0
    backoff_s: float = 0.5
    breaker_failures: int | None = None
    breaker_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the values."""
        may_be_none = ("timeout_s", "calls_per_s", "max_concurrency", "breaker_failures")
        for name in ("timeout_s", "calls_per_s", "backoff_s", "breaker_s"):
            value = getattr(self, name)
            if not (value is None and name in may_be_none) and not is_seconds(value):
                raise ConfigurationError(f"{name} of a backend is {value!r}: set a number above 0.")
        for name, least in (("max_concurrency", 1), ("breaker_failures", 1), ("retries", 0)):
            value = getattr(self, name)
            if not (value is None and name in may_be_none) and not is_count(value, least):
                raise ConfigurationError(f"{name} of a backend is {value!r}: set {least} or more, a whole number.")


class Backend:
    """One backend's state; for one event loop.

    Args:
        policy: how it is treated.
        timeout_s: seconds of a call where the policy sets none.
        own: turns of this backend; by default as many as the policy says.
        shared: turns of all backends together; by default none are counted.
        jitter: spreads retries.
    """

    def __init__(
        self,
        policy: BackendPolicy,
        *,
        timeout_s: float,
        own: asyncio.Semaphore | None = None,
        shared: asyncio.Semaphore | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._policy = policy
        self._timeout_s = policy.timeout_s or timeout_s
        if own is None and policy.max_concurrency is not None:
            own = asyncio.Semaphore(policy.max_concurrency)
        self._own = own or contextlib.nullcontext()
        self._shared = shared or contextlib.nullcontext()
        self._jitter = jitter or random.Random()
        self._next_start = 0.0
        self._failures = 0
        self._closed_until = -math.inf
        self._trying = False

    async def call(self, attempt: Attempt[T]) -> T:
        """Make a call, again where that may help.

        Raises:
            ToolError: the last try's; ``unreachable`` at once while the backend is left alone.
        """
        probe = self._admit()
        try:
            result = await self._try(attempt)
        except ToolError as error:
            self._note(failed=error.kind in INFRASTRUCTURE_ERRORS and error.kind is not ErrorKind.RATE_LIMITED)
            raise
        else:
            self._note(failed=False)
            return result
        finally:
            if probe:
                self._trying = False

    async def _try(self, attempt: Attempt[T]) -> T:
        left = self._timeout_s
        retry = 0
        while True:
            try:
                # The shared turn last: calls that wait for a narrow or slow backend must not hold turns that others
                # could use.
                async with self._own:
                    await self._pace()
                    async with self._shared:
                        started = time.monotonic()
                        try:
                            return await attempt(left)
                        finally:
                            left -= time.monotonic() - started
            except ToolError as error:
                wait = self._wait_before_retry(retry, error)
                if wait is None or wait >= left:
                    raise
            await asyncio.sleep(wait)
            left -= wait
            retry += 1

    def _wait_before_retry(self, retry: int, error: ToolError) -> float | None:
        """Seconds until a call is worth another try, ``None`` if it is not."""
        if retry == self._policy.retries or error.kind not in INFRASTRUCTURE_ERRORS:
            return None
        backoff = self._policy.backoff_s * 2**retry * self._jitter.uniform(0.5, 1.5)
        return max(backoff, error.retry_after_s or 0.0)

    async def _pace(self) -> None:
        if self._policy.calls_per_s is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 1 / self._policy.calls_per_s
        if start > now:
            await asyncio.sleep(start - now)

    def _admit(self) -> bool:
        """Whether this call is the one that finds out if the backend is up again."""
        if self._policy.breaker_failures is None or self._failures < self._policy.breaker_failures:
            return False
        if self._trying or time.monotonic() < self._closed_until:
            raise ToolError(ErrorKind.UNREACHABLE, "Its backend failed several times in a row; go on another way.")
        self._trying = True
        return True

    def _note(self, *, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if self._policy.breaker_failures is not None and self._failures >= self._policy.breaker_failures:
            self._closed_until = time.monotonic() + self._policy.breaker_s
