"""Results of earlier calls, in memory and optionally in a file that processes share."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import DataError
from opensearch_lightning.tools.output_rows import COLUMNS, from_row, to_row
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.sqlite_file import SqliteFile

_TABLE = f"CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, {COLUMNS})"


def cache_key(namespace: str, tool: Any, arguments: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Key of a call: what the tool is, as JSON; canonical arguments, and the content of each image argument in place of
    its name.
    """
    values = {name: {"image": digests[name]} if name in digests else value for name, value in arguments.items()}
    text = json.dumps([namespace, tool, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ResultCache:
    """Outputs by :func:`cache_key`; least recently used ones leave the memory first. Failures are never put here.

    Args:
        path: SQLite file shared by processes (write-ahead log), images in it as PNG; ``None`` for memory alone.
        namespace: what the results depend on besides the call, such as a world's fingerprint or a provider and a date:
            results of another namespace are never returned.
        max_bytes: memory for kept results, about.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(
        self, path: str | Path | None = None, *, namespace: str = "", max_bytes: int = 256 * 1024 * 1024
    ) -> None:
        self.namespace = namespace
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, ToolOutput] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._file = None if path is None else SqliteFile(path, _TABLE, name="cache")

    async def get(self, key: str) -> ToolOutput | None:
        """The output kept under ``key``, or ``None``."""
        with self._lock:
            output = self._kept.get(key)
            if output is not None:
                self._kept.move_to_end(key)
                return output
        if self._file is None:
            return None
        query = "SELECT text, image, hits, note FROM results WHERE key = ?"
        try:
            row = await self._file.run(lambda connection: connection.execute(query, (key,)).fetchone())
        except sqlite3.Error as error:
            self._complain(error)
            return None
        if row is None:
            return None
        try:
            output = await from_row(row)
        except DataError as error:
            self._complain(error)
            return None
        self._keep(key, output)
        return output

    async def put(self, key: str, output: ToolOutput) -> None:
        """Keep an output."""
        self._keep(key, output)
        if self._file is not None:
            values = (key, *await to_row(output))
            insert = "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)"
            try:
                await self._file.run(lambda connection: connection.execute(insert, values))
            except sqlite3.Error as error:
                self._complain(error)

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        if self._file is not None:
            self._file.close()

    def _keep(self, key: str, output: ToolOutput) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = output
            self._bytes += _size(output)
            while self._bytes > self._max_bytes and self._kept:
                self._bytes -= _size(self._kept.popitem(last=False)[1])

    def _complain(self, error: sqlite3.Error | DataError) -> None:
        # A cache that fails costs time, never a call.
        assert self._file is not None
        warnings.warn(f"The cache file {self._file.path} could not be used ({error}); going on without.", stacklevel=2)


def _size(output: ToolOutput) -> int:
    pixels = output.image.width * output.image.height * 3 if output.image is not None else 0
    return 500 + len(output.text) + pixels
