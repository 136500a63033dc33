"""Calls of a run and what came of them, on disk, so that an experiment can be repeated without the services."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import ConfigurationError, DataError, ToolError
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.output_rows import COLUMNS, from_row, to_row
from opensearch_lightning.tools.protocol import CallKey, Tool, ToolOutput
from opensearch_lightning.tools.sqlite_file import SqliteFile
from opensearch_lightning.types import ErrorKind

logger = logging.getLogger(__name__)

_TABLES = f"""
CREATE TABLE IF NOT EXISTS tools (position INTEGER PRIMARY KEY, name TEXT, backend TEXT, schema TEXT);
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY, content TEXT, task_id TEXT, rollout INTEGER, step INTEGER, tool TEXT, arguments TEXT,
    error TEXT, {COLUMNS}
);
CREATE INDEX IF NOT EXISTS by_content ON calls (content);
"""
_INSERT = "INSERT INTO calls VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# The same call of the same rollout comes first, the last time it was made; then any other that came to something.
_FIND = """
SELECT error, text, image, hits, note, task_id = ? AND rollout = ? AND step = ? AS same FROM calls WHERE content = ?
ORDER BY same DESC, NOT same AND error IS NOT NULL, id DESC LIMIT 1
"""


@dataclass(frozen=True, kw_only=True)
class RecordedTool:
    """What a recording knows of a tool: enough to tell the policy of it and to check calls."""

    name: str
    backend: str
    schema: Mapping[str, Any]

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Refuse: a recording answers through the executor, which knows which call it is.

        Raises:
            ToolError: always.
        """
        raise ToolError(ErrorKind.BACKEND_ERROR, "This tool is only a recording.")


class Recording:
    """One file of calls, written by :class:`Recorder` and read by :class:`Replay`.

    A call is known by its tool, its arguments and the pixels of the pictures that it names, and by task, rollout and
    step.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._file = SqliteFile(path, _TABLES, name="recording", read_only=read_only)

    def tools(self) -> list[RecordedTool]:
        """The tools of the run that was recorded, in their order."""
        query = "SELECT name, backend, schema FROM tools ORDER BY position"
        rows = self._file.run_blocking(lambda connection: connection.execute(query).fetchall())
        return [RecordedTool(name=name, backend=backend, schema=json.loads(schema)) for name, backend, schema in rows]

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        self._file.close()


class Recorder(Recording):
    """Writes what comes of each call that reaches a tool or the cache, failures of the tool too.

    Several processes may write to one file; a run that goes on adds to it.

    Args:
        path: SQLite file, on a disk of this machine.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def begin(self, tools: list[Tool]) -> None:
        """Note the tools of the run.

        Raises:
            ConfigurationError: the file holds the calls of other tools.
        """
        rows = [(i, tool.name, tool.backend, json.dumps(tool.schema)) for i, tool in enumerate(tools)]

        def work(connection: sqlite3.Connection) -> list[Any]:
            # Against another process that begins at the same time.
            connection.execute("BEGIN IMMEDIATE")
            known = connection.execute("SELECT * FROM tools ORDER BY position").fetchall()
            if not known:
                connection.executemany("INSERT INTO tools VALUES (?, ?, ?, ?)", rows)
            return known or rows

        try:
            noted = self._file.run_blocking(work)
        except sqlite3.Error as error:
            raise ConfigurationError(f"The file {self.path} is no recording ({error}): name another.") from error
        if noted != rows:
            raise ConfigurationError(
                f"The recording {self.path} is of other tools, or of other schemas of them: name another file."
            )

    async def add(
        self, content: str, key: CallKey, tool: str, arguments: Mapping[str, Any], outcome: ToolOutput | ToolError
    ) -> None:
        """Note one call and its outcome; a file that cannot be written is logged and fails no call."""
        output = ToolOutput(text=outcome.message) if isinstance(outcome, ToolError) else outcome
        error = str(outcome.kind) if isinstance(outcome, ToolError) else None
        asked = json.dumps(arguments, sort_keys=True)
        row = (content, key.task_id, key.rollout, key.step, tool, asked, error, *await to_row(output))
        try:
            await self._file.run(lambda connection: connection.execute(_INSERT, row))
        except sqlite3.Error as error:
            logger.error("The call of %s at %s is missing in the recording %s: %s", tool, key, self.path, error)


class Replay(Recording):
    """Answers calls from a recording.

    The same call of the same rollout gets what it got then, the last time if it was made more than once; a call made
    elsewhere gets what an equal one got, a success rather than a failure; any other call fails as ``backend_error`` and
    says that it was not recorded.

    Args:
        path: what a :class:`Recorder` wrote.

    Raises:
        DataError: there is no recording.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise DataError(f"There is no recording at {path}: make one with a Recorder.")
        try:
            super().__init__(path, read_only=True)
            tools = self.tools()
        except (ConfigurationError, sqlite3.Error, ValueError) as error:
            raise DataError(f"The file {path} is no recording ({error}): name one of a Recorder.") from error
        self.unrecorded = 0
        if not tools:
            raise DataError(f"The recording {path} holds no tools: make one with a Recorder.")

    async def outcome(self, content: str, key: CallKey, tool: str) -> ToolOutput:
        """What the call came to.

        Raises:
            ToolError: the error that it came to, or that it was not recorded.
        """
        values = (key.task_id, key.rollout, key.step, content)
        try:
            row = await self._file.run(lambda connection: connection.execute(_FIND, values).fetchone())
            if row is not None:
                return await _replayed(row)
        except (sqlite3.Error, DataError, ValueError) as error:
            logger.warning("The call of %s at %s cannot be read in the recording %s: %s", tool, key, self.path, error)
            raise ToolError(ErrorKind.BACKEND_ERROR, "This call cannot be read in the recording.") from error
        self.unrecorded += 1
        logger.warning("A call of %s at %s is not in the recording %s", tool, key, self.path)
        raise ToolError(ErrorKind.BACKEND_ERROR, "This call was not recorded.")


async def _replayed(row: tuple[Any, ...]) -> ToolOutput:
    error, text, image, hits, note, _ = row
    if error is not None:
        raise ToolError(ErrorKind(error), text)
    return await from_row((text, image, hits, note))
