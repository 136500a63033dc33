"""The connection to one MCP server: opened when first needed, shared by calls, and opened anew after it was lost."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from opensearch_lightning.errors import ToolError, one_line
from opensearch_lightning.tools.secrets import SHORTEST, Secret, keep_out_of_logs
from opensearch_lightning.tools.threads import LoopThread, in_thread
from opensearch_lightning.tools.workshop import unavailable
from opensearch_lightning.types import ErrorKind

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

logger = logging.getLogger(__name__)

ALL = "all"
_HOLDS_A_KEY = re.compile("KEY|TOKEN|SECRET|PASS", re.IGNORECASE)

# After so many calls without an answer in a row the server must show that it still answers.
_DOUBTFUL = 3
_CHECK_SECONDS = 2.0
_READ_SECONDS = 300.0
_MOST_PAGES = 100
_SHOWN = 300

# What HTTP said to the call in whose context a request is sent, which the protocol's errors leave out.
_refusals: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A status of HTTP from 400 on, and the seconds that its ``Retry-After`` names."""

    status: int
    retry_after_s: float | None


class SessionError(Exception):
    """A session could not be opened; the message is the reason, in one line."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server is: a ``command`` to start it with, or a ``url``.

    ``env_names`` are variables that the command gets from the environment besides ``PATH``, ``HOME`` and the like, or
    :data:`ALL`. ``timeout_s`` bounds start and listing. What the command writes on its error stream is appended to
    ``stderr_path`` or dropped.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env_names: tuple[str, ...] | str = ()
    token: Secret | None = None
    timeout_s: float = 30.0
    stderr_path: str | None = None

    @property
    def secrets(self) -> list[Secret]:
        """The token, and the variables handed on whose names say that they hold a key."""
        names = () if isinstance(self.env_names, str) else filter(_HOLDS_A_KEY.search, self.env_names)
        values = {name: os.environ.get(name, "").strip() for name in names}
        handed_on = [Secret(name, value) for name, value in values.items() if len(value) >= SHORTEST]
        return handed_on if self.token is None else [self.token, *handed_on]

    def redact(self, value: Any) -> Any:
        """Text or parsed JSON of the server's without keys that it may have sent back."""
        for secret in self.secrets:
            value = secret.redact(value)
        return value

    @property
    def where(self) -> str:
        """The server in a message."""
        return f"`{shlex.join(self.command)}`" if self.command else self.url

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A client that is connected; to be entered and left in one task."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as stack:
            if self.command:
                program, *arguments = self.command
                parameters = StdioServerParameters(command=program, args=arguments, env=self.environment())
                transport = stdio_client(parameters, errlog=stack.enter_context(_log_file(self.stderr_path)))
            else:
                http = await stack.enter_async_context(self._http_client())
                transport = streamable_http_client(self.url, http_client=http)
            yield await stack.enter_async_context(Client(transport, cache=None))

    def environment(self) -> dict[str, str]:
        """Variables that the command gets besides ``PATH``, ``HOME`` and the like."""
        if self.env_names == ALL:
            return dict(os.environ)
        return {name: os.environ[name] for name in self.env_names if name in os.environ}

    def _http_client(self) -> Any:
        import httpx2

        keep_out_of_logs("mcp.client", "httpx2", "httpcore2")
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token.reveal()}"}
        return httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(self.timeout_s, read=_READ_SECONDS),
            # The executor limits calls at once, not the pool.
            limits=httpx2.Limits(max_connections=None),
            event_hooks={"response": [_note_refusal]},
        )


def _log_file(path: str | None) -> TextIO:
    return open(os.devnull if path is None else path, "a", encoding="utf-8")


async def _note_refusal(response: Any) -> None:
    refusals = _refusals.get()
    if refusals is not None and response.status_code >= 400:
        wait = response.headers.get("Retry-After", "").strip()
        refusals.append(Refusal(status=response.status_code, retry_after_s=float(wait) if wait.isdecimal() else None))


class Session:
    """One connection, opening from its construction on, in a task of its own on the running loop.

    A task of its own, since what the client enters has to be left in the task that entered it, whichever call is
    cancelled. Cancelling that task may leave a started server behind: :meth:`close` it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import anyio

        self.loop = asyncio.get_running_loop()
        self.listed: list[Listed] = []
        self.server_name: str | None = None
        self.unanswered = 0
        self._endpoint = endpoint
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + endpoint.timeout_s)
        self._opened: asyncio.Future[Client] = self.loop.create_future()
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._closing = asyncio.Event()
        self.task = self.loop.create_task(self._live())

    async def client(self) -> Client:
        """The client, once connected.

        Raises:
            SessionError: the server could not be reached.
        """
        # Not awaited itself: a caller that is cancelled must not cancel it for the others.
        await asyncio.wait({self._opened})
        return self._opened.result()

    def close(self) -> None:
        """Let the session end; :attr:`task` is done when it has."""
        self._closing.set()
        if not self._opened.done():
            self._scope.cancel()

    async def _live(self) -> None:
        refusals: list[Refusal] = []
        _refusals.set(refusals)
        reason = "it was closed meanwhile"
        try:
            with self._scope:
                async with self._endpoint.connect() as client:
                    self.listed = await _list_all(client)
                    self.server_name = client.server_info.name if client.server_info is not None else None
                    self._scope.deadline = math.inf
                    self._opened.set_result(client)
                    await self._closing.wait()
            if not self._closing.is_set():
                reason = f"no answer within {self._endpoint.timeout_s:g} s"
        except Exception as error:
            reason = _reason(error, refusals, self._endpoint)
            logger.debug("The session with %s ended: %s", self._endpoint.where, reason)
        finally:
            if not self._opened.done():
                self._opened.set_exception(SessionError(reason))


async def list_once(endpoint: Endpoint) -> tuple[str | None, list[Listed]]:
    """Name and tools of a server, from a session of their own.

    Raises:
        SessionError: the server could not be reached.
    """
    session = Session(endpoint)
    try:
        await session.client()
    finally:
        session.close()
        await asyncio.wait({session.task})
    return session.server_name, session.listed


async def _list_all(client: Client) -> list[Listed]:
    listed: list[Listed] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return listed


def _reason(error: BaseException, refusals: list[Refusal], endpoint: Endpoint) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = endpoint.redact(one_line(error))[:_SHOWN]
    statuses = [refusal.status for refusal in refusals]
    if 401 in statuses or 403 in statuses:
        return f"it refused the key{'' if endpoint.token is None else f' in {endpoint.token.variable}'}"
    if refusals:
        return f"it answered with status {refusals[-1].status}"
    return said or type(error).__name__


class McpServer:
    """Calls to one server, side by side, from any event loop.

    Sessions live on a loop of their own, where no loop that ends or cancels its tasks can tear them.

    Args:
        endpoint: where the server is.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()
        self._session: Session | None = None
        self._ending: set[Session] = set()
        self._checks: set[asyncio.Task[None]] = set()

    async def call(self, tool: str, arguments: Mapping[str, Any], *, shown: str) -> CallToolResult:
        """What the server answers.

        Args:
            tool: name of the tool at the server.
            arguments: as the server takes them.
            shown: name of the tool for messages to the policy.

        Raises:
            ToolError: ``unreachable`` where the connection was lost or cannot be opened, so that the next call opens
                another; ``timeout``, ``rate_limited``, ``invalid_argument`` or ``backend_error`` where the server said
                so.
        """
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread()
            thread = self._thread
        return await thread.run(self._call(tool, arguments, shown))

    async def _call(self, tool: str, arguments: Mapping[str, Any], shown: str) -> CallToolResult:
        from mcp import MCPError

        session = self._current()
        client = await self._client_of(session, shown)
        refusals: list[Refusal] = []
        context = _refusals.set(refusals)
        try:
            result = await client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            self._doubt(session)
            raise
        except MCPError as error:
            raise self._failure(session, error, refusals, shown) from error
        finally:
            _refusals.reset(context)
        session.unanswered = 0
        return result

    async def probe(self, tools: Collection[str]) -> None:
        """Connect anew, look whether the server still offers ``tools``, by its own names, and close.

        Raises:
            ToolError: it cannot be reached, or a tool is gone.
        """
        # In a thread, where the caller's cancellation leaves no server behind.
        try:
            _, offered = await in_thread(lambda: asyncio.run(list_once(self.endpoint)))
        except SessionError as error:
            raise ToolError(ErrorKind.UNREACHABLE, f"{self.endpoint.where} cannot be reached: {error}.") from error
        if gone := sorted(set(tools) - {listed.name for listed in offered}):
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.endpoint.where} no longer offers {gone}.")

    def redact(self, text: str) -> str:
        """``text`` without the key, should the server have sent it back."""
        redacted: str = self.endpoint.redact(text)
        return redacted

    async def aclose(self) -> None:
        """End the session, and the server that it started; a later call opens a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                await thread.run(self._end())
            finally:
                await in_thread(thread.stop)

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._session.loop is loop:
            self._drop(self._session)
        ending = {session.task for session in self._ending if session.loop is loop}
        if ending:
            await asyncio.wait(ending)

    def _current(self) -> Session:
        session = self._session
        if session is None or session.loop is not asyncio.get_running_loop() or session.task.done():
            session = self._session = Session(self.endpoint)
        return session

    async def _client_of(self, session: Session, shown: str) -> Client:
        try:
            return await session.client()
        except SessionError as error:
            if self._session is session:
                logger.warning("The MCP server %s cannot be reached: %s", self.endpoint.where, error)
            self._drop(session)
            raise unavailable(shown, ErrorKind.UNREACHABLE) from error

    def _drop(self, session: Session) -> None:
        if self._session is session:
            self._session = None
        if not session.task.done():
            self._ending.add(session)
            session.task.add_done_callback(lambda _: self._ending.discard(session))
            session.close()

    def _doubt(self, session: Session) -> None:
        """Count a call that was given up; a server that hangs would otherwise keep the session for good."""
        session.unanswered += 1
        if session.unanswered == _DOUBTFUL and session is self._session:
            check = session.loop.create_task(self._check(session))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _check(self, session: Session) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await (await session.client()).list_tools()
        except Exception as error:
            logger.warning("The MCP server %s hangs and is connected to anew: %r", self.endpoint.where, error)
            self._drop(session)
        session.unanswered = 0

    def _failure(self, session: Session, error: MCPError, refusals: list[Refusal], shown: str) -> ToolError:
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, REQUEST_TIMEOUT

        # The message too: servers use the first code for errors of their own, and the second for bad requests.
        if (error.code, error.message) in (
            (CONNECTION_CLOSED, "Connection closed"),
            (INVALID_REQUEST, "Session terminated"),
        ):
            if self._session is session:
                logger.warning("The MCP server %s ended the connection", self.endpoint.where)
            self._drop(session)
            return unavailable(shown, ErrorKind.UNREACHABLE)
        session.unanswered = 0
        if refusals:
            last = refusals[-1]
            if last.status == 429:
                limited = unavailable(shown, ErrorKind.RATE_LIMITED)
                return ToolError(limited.kind, limited.message, retry_after_s=last.retry_after_s)
            if last.status in (502, 503, 504):
                return unavailable(shown, ErrorKind.UNREACHABLE)
            if last.status in (401, 403):
                logger.warning("The MCP server %s refused the key", self.endpoint.where)
                return unavailable(shown, ErrorKind.BACKEND_ERROR)
        if error.code == REQUEST_TIMEOUT:
            return unavailable(shown, ErrorKind.TIMEOUT)
        kind = ErrorKind.INVALID_ARGUMENT if error.code == INVALID_PARAMS else ErrorKind.BACKEND_ERROR
        return ToolError(kind, shortened(self.redact(error.message)) or unavailable(shown, kind).message)


def shortened(text: str) -> str:
    """``text`` in one line of a few hundred characters."""
    line = one_line(text)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
