"""A lock that takes turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """A lock that one thread which takes it again and again cannot keep another one out of.

    A plain lock that is released and at once taken again goes mostly to the thread that had it.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._held = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock; whoever waits already comes before whoever asks later."""
        with self._next:
            self._held.acquire()
        try:
            yield
        finally:
            self._held.release()
