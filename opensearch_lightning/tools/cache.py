"""Results of earlier calls, in memory and optionally in a file that processes share."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sqlite3
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.pictures import as_rgb, png_bytes
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.threads import in_thread

_TABLE = (
    "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, text TEXT NOT NULL, image BLOB, hits INTEGER, note TEXT)"
)
_BUSY_SECONDS = 5.0


def cache_key(namespace: str, tool: str, arguments: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Key of a call: tool, canonical arguments, and the content of each image argument in place of its name."""
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
        self._file = None if path is None else _SharedFile(Path(path))

    async def get(self, key: str) -> ToolOutput | None:
        """The output kept under ``key``, or ``None``."""
        with self._lock:
            output = self._kept.get(key)
            if output is not None:
                self._kept.move_to_end(key)
                return output
        if self._file is None:
            return None
        file = self._file
        output = await in_thread(lambda: file.read(key))
        if output is not None:
            self._keep(key, output)
        return output

    async def put(self, key: str, output: ToolOutput) -> None:
        """Keep an output."""
        self._keep(key, output)
        if self._file is not None:
            file = self._file
            await in_thread(lambda: file.write(key, output))

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


def _size(output: ToolOutput) -> int:
    pixels = output.image.width * output.image.height * 3 if output.image is not None else 0
    return 500 + len(output.text) + pixels


class _SharedFile:
    """The SQLite file. Its connection belongs to one process and is opened anew after a fork."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connected()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"The cache file {path} cannot be used ({error}): remove it or name another."
            ) from error

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._process != os.getpid():
            connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                connection.execute(_TABLE)
            # One inherited through a fork is kept, unused: closing it here would disturb the process it belongs to.
            self._inherited = self._connection
            self._connection, self._process = connection, os.getpid()
        return self._connection

    def read(self, key: str) -> ToolOutput | None:
        try:
            with self._lock:
                query = "SELECT text, image, hits, note FROM results WHERE key = ?"
                row = self._connected().execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            self._complain(error)
            return None
        if row is None:
            return None
        text, encoded, hits, note = row
        image = None if encoded is None else as_rgb(Image.open(io.BytesIO(encoded)))
        return ToolOutput(text=text, image=image, hits=hits, note=note)

    def write(self, key: str, output: ToolOutput) -> None:
        encoded = None if output.image is None else png_bytes(output.image)
        row = (key, output.text, encoded, output.hits, output.note)
        try:
            with self._lock, self._connected() as connection:
                connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            self._complain(error)

    def _complain(self, error: sqlite3.Error) -> None:
        # A cache that fails costs time, never a call.
        warnings.warn(f"The cache file {self._path} could not be used ({error}); going on without.", stacklevel=2)

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None
