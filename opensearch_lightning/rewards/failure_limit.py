"""When a judge fails too often to go on."""

from __future__ import annotations

import threading
from collections import deque

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools.backends import is_count


class FailureLimit:
    """The share of failures among a judge's last judgements, against what is allowed. Safe to share by threads.

    Args:
        max_failed: largest share of failures that is borne, in [0, 1]; 1 bears any.
        window: how many of the last judgements are looked at.
        least: judgements before which nothing is concluded, at most ``window``.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    def __init__(self, max_failed: float = 0.25, *, window: int = 64, least: int = 16) -> None:
        if not 0.0 <= max_failed <= 1.0:
            raise ConfigurationError(f"max_failed is {max_failed}: set a share of judgements, from 0 to 1.")
        if not is_count(least, 1) or not is_count(window, least):
            raise ConfigurationError(
                f"least is {least!r}, window {window!r}: set whole numbers, 1 or more, and window at least least."
            )
        self.max_failed = max_failed
        self._least = least
        self._failed: deque[bool] = deque(maxlen=window)
        self._lock = threading.Lock()

    def note(self, *, failed: bool) -> None:
        """Count one judgement."""
        with self._lock:
            self._failed.append(failed)

    def crossed(self) -> tuple[int, int] | None:
        """``(failures, judgements)`` of the window when too many of them failed, else ``None``."""
        with self._lock:
            failures, seen = sum(self._failed), len(self._failed)
        return (failures, seen) if seen >= self._least and failures > self.max_failed * seen else None
