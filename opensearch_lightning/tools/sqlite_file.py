"""A SQLite file that threads, event loops and processes share."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from opensearch_lightning.errors import ConfigurationError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_BUSY_SECONDS = 5.0


class SqliteFile:
    """One file with a write-ahead log; one thread a process works on it, a transaction at a time.

    It is opened when first used, again after :meth:`close`, and anew after a fork.

    Args:
        path: the file; folders above it are made. A file system of this machine, for the log needs shared memory.
        tables: SQL that makes what is not there yet.
        name: what the file is, for messages.
        read_only: nothing is written to the file, which has to be there.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(self, path: str | Path, tables: str, *, name: str, read_only: bool = False) -> None:
        self.path = Path(path)
        self._tables = tables
        self._read_only = read_only
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[object] = []
        self._process = 0
        try:
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._submit(lambda connection: None).result()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"The {name} file {path} cannot be used ({error}): remove it or name another."
            ) from error

    async def run(self, work: Work[T]) -> T:
        """What ``work`` makes of the connection, in a transaction of its own.

        Raises:
            sqlite3.Error: the file could not be used; nothing of ``work`` is in it.
        """
        return await asyncio.wrap_future(self._submit(work))

    def run_blocking(self, work: Work[T]) -> T:
        """:meth:`run`, for callers without an event loop."""
        return self._submit(work).result()

    def close(self) -> None:
        """Finish what was begun and close the file."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None and self._process == os.getpid():
                worker.submit(self._disconnect)
                worker.shutdown()

    def _submit(self, work: Work[T]) -> Future[T]:
        with self._lock:
            if self._worker is None or self._process != os.getpid():
                # Those inherited through a fork are kept, unused: closing them would disturb the process they are of.
                self._inherited += [self._worker, self._connection]
                self._worker, self._connection = ThreadPoolExecutor(1, thread_name_prefix="sqlite"), None
                self._process = os.getpid()
            return self._worker.submit(self._transact, work)

    def _transact(self, work: Work[T]) -> T:
        if self._connection is None:
            self._connection = self._connect()
        with self._connection:
            return work(self._connection)

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            address = f"{self.path.absolute().as_uri()}?mode=ro"
            return sqlite3.connect(address, timeout=_BUSY_SECONDS, check_same_thread=False, uri=True)
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, check_same_thread=False)
        until = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.executescript(self._tables)
                return connection
            except sqlite3.OperationalError as error:
                # Another process that makes the log at this moment is not waited for by SQLite itself.
                if "locked" not in str(error) or time.monotonic() > until:
                    connection.close()
                    raise
                time.sleep(0.02)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
