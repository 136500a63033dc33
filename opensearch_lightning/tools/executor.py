"""Carries out the policy's calls. All tool-execution errors are decided here, and a bad call never raises."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.arguments import check_arguments
from opensearch_lightning.tools.backends import BackendPolicy, is_count, is_seconds
from opensearch_lightning.tools.cache import ResultCache
from opensearch_lightning.tools.faults import FaultInjector
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.metrics import ExecutorMetrics, MetricsRecorder
from opensearch_lightning.tools.protocol import CallKey, LimitedTool, Tool, ToolOutput
from opensearch_lightning.tools.recording import Recorder, Replay
from opensearch_lightning.tools.schemas import ARGUMENT_ALIASES, TOOL_ALIASES
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.tools.workshop import CheckedCall, Workshop, call_key, unavailable
from opensearch_lightning.types import Action, ErrorKind, ToolResult

ToolPlaces = Sequence[Tool | Sequence[Tool]] | Mapping[str, Tool | Sequence[Tool] | None]

logger = logging.getLogger(__name__)

_UNREADABLE = {
    ErrorKind.NO_ACTION: "Write one tool call or one response.",
    ErrorKind.SEVERAL_ACTIONS: "Write only one tool call or one response a turn.",
    ErrorKind.MALFORMED_CALL: "A tool call is one JSON object with name and arguments.",
}


class ToolExecutor:
    """Runs tools for many rollouts at once, from any event loop.

    Tools run on an event loop of the executor's own, so that none can stall the caller's and connections live from one
    batch to the next. Order of decisions: the action's own error, unknown tool, arguments, image names, injected fault,
    cache, tool.

    Args:
        tools: the tools on offer, in the order in which the policy is told of them. Several may stand in one place, as
            those of one server do; in a mapping, which names the places, ``None`` leaves a place empty.
        timeout_s: seconds a call may take once it has its turn.
        max_concurrency: tool runs at once; further calls wait.
        faults: decides which calls fail before they reach a tool, the cache notwithstanding.
        cache: gives equal calls the result of the first; equal calls at one time run once.
        backends: by backend, how its calls are limited, tried again and left alone.
        recorder: writes down what comes of each call.
        tool_aliases: other names of tools, to wire names.
        argument_aliases: per wire name, other names of arguments.

    Raises:
        ConfigurationError: no tools, two of one name, a schema that cannot be used, a value out of range, or, where no
            place is left empty, a policy or an outage of a backend that no tool has.
    """

    def __init__(
        self,
        tools: ToolPlaces,
        *,
        timeout_s: float = 10.0,
        max_concurrency: int = 64,
        faults: FaultInjector | None = None,
        cache: ResultCache | None = None,
        backends: Mapping[str, BackendPolicy] | None = None,
        recorder: Recorder | None = None,
        tool_aliases: Mapping[str, str] = TOOL_ALIASES,
        argument_aliases: Mapping[str, Mapping[str, str]] = ARGUMENT_ALIASES,
    ) -> None:
        left_out = isinstance(tools, Mapping) and None in tools.values()
        tools = flat(tools)
        _check_tools(tools)
        if not is_seconds(timeout_s):
            raise ConfigurationError(f"timeout_s is {timeout_s!r}: set seconds above 0.")
        if not is_count(max_concurrency, 1):
            raise ConfigurationError(f"max_concurrency is {max_concurrency!r}: set 1 or more.")
        for backend, policy in (backends or {}).items():
            if not isinstance(policy, BackendPolicy):
                raise ConfigurationError(
                    f"The policy of {backend} is {policy!r}: give a BackendPolicy, in a configuration by "
                    "_target_: opensearch_lightning.tools.BackendPolicy."
                )
        known = {tool.backend for tool in tools}
        for what, named in (("Outages", faults.outages if faults is not None else {}), ("Policies", backends or {})):
            if unknown := sorted(set(named) - known):
                if left_out:
                    logger.info("%s of %s change nothing: a tool is left out", what, unknown)
                    continue
                raise ConfigurationError(f"{what} of {unknown}, which no tool has: choose from {sorted(known)}.")
        self._tools = {tool.name: tool for tool in tools}
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._faults = faults
        self._cache = cache
        self._policies = dict(backends or {})
        self._recorder = recorder
        self._replay: Replay | None = None
        if recorder is not None:
            recorder.begin(tools)
        self._tool_aliases = tool_aliases
        self._argument_aliases = argument_aliases
        self._metrics = MetricsRecorder(self._tools)
        self._workshop: Workshop | None = None
        self._starting = threading.Lock()
        self._ended: Future[None] | None = None

    @classmethod
    def replaying(
        cls,
        path: str | Path,
        *,
        faults: FaultInjector | None = None,
        tool_aliases: Mapping[str, str] = TOOL_ALIASES,
        argument_aliases: Mapping[str, Mapping[str, str]] = ARGUMENT_ALIASES,
        **of_the_tools: Any,
    ) -> ToolExecutor:
        """An executor that answers from a recording and reaches no tool.

        Args:
            path: what a :class:`~opensearch_lightning.tools.Recorder` wrote.
            faults: as of the constructor, like the aliases.
            tool_aliases: see there.
            argument_aliases: see there.
            of_the_tools: the constructor's other arguments, which an experiment may set, and which change nothing here.

        Raises:
            ConfigurationError: an argument that the constructor does not have either.
            DataError: there is no recording.
        """
        if unknown := sorted(of_the_tools.keys() - inspect.signature(cls).parameters.keys()):
            raise ConfigurationError(f"An executor has no setting {unknown[0]!r}.")
        replay = Replay(path)
        executor = cls(replay.tools(), faults=faults, tool_aliases=tool_aliases, argument_aliases=argument_aliases)
        executor._replay = replay
        return executor

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Function schemas of the tools, in their order, for the system turn."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def unrecorded(self) -> int:
        """Calls of a replay that its recording does not hold."""
        return 0 if self._replay is None else self._replay.unrecorded

    def metrics(self) -> ExecutorMetrics:
        """Counts and latencies since the last :meth:`reset`."""
        return self._metrics.snapshot()

    def reset(self) -> None:
        """Start counting anew."""
        self._metrics.reset()

    def start(self) -> None:
        """Start the executor's loop; the first call does so too."""
        with self._starting:
            if self._workshop is None:
                tools = list(self._tools.values())
                self._workshop = Workshop(tools, self._timeout_s, self._max_concurrency, self._cache, self._policies)

    async def aclose(self) -> None:
        """Cancel what runs and release threads and files; a later call starts anew."""
        with self._starting:
            workshop, self._workshop = self._workshop, None
            if workshop is not None:
                self._ended = Future()
                await_end = partial(_stop, workshop, self._ended)
        if workshop is not None:
            await in_thread(await_end)
        for file in (self._cache, self._recorder, self._replay):
            if file is not None:
                await in_thread(file.close)

    async def execute(self, action: Action, images: ImageBook, key: CallKey) -> ToolResult:
        """Carry out one action and say what came of it.

        The image of a result is not yet in ``images``: the text names it by the name it gets when added next.

        Args:
            action: a tool call, or the error that the parser found.
            images: the images of the rollout so far.
            key: where in which rollout; decides injected faults.

        Raises:
            ValueError: ``action`` is a response, which is no business of tools.
        """
        if action.kind == "response":
            raise ValueError("A response was given to the tool executor: end the rollout instead.")
        started = time.perf_counter()
        tool: str | None = None
        served: CheckedCall | None = None
        outcome: ToolOutput | ToolError | None = None
        try:
            tool = self._resolve(action)
            call = self._check(tool, action.arguments or {}, images)
            fault = self._faults.fault(key, call.tool.backend) if self._faults is not None else None
            if fault is not None:
                result = await self._injected(tool, fault)
            else:
                served = call
                outcome, cached = await self._serve(call, images, key)
                result = _succeeded(call, outcome, cached, images)
        except ToolError as error:
            outcome = error
            result = _failed(tool, error)
        result = replace(result, latency_s=time.perf_counter() - started)
        self._metrics.record(result, reached_tool=served is not None and not result.cached)
        if self._recorder is not None and served is not None and outcome is not None:
            content = await call_key(served, images)
            await self._recorder.add(content, key, served.tool.name, served.arguments, outcome)
        return result

    def _resolve(self, action: Action) -> str:
        """Wire name of the tool that an action calls."""
        if action.kind == "error" or action.name is None:
            kind = action.error or ErrorKind.MALFORMED_CALL
            raise ToolError(kind, _UNREADABLE.get(kind, "The call cannot be read."))
        name = self._tool_aliases.get(action.name, action.name) if action.name not in self._tools else action.name
        if name not in self._tools:
            known = ", ".join(self._tools)
            raise ToolError(ErrorKind.UNKNOWN_TOOL, f"There is no tool {action.name[:40]!r}; known: {known}.")
        return name

    def _check(self, name: str, arguments: Mapping[str, Any], images: ImageBook) -> CheckedCall:
        tool = self._tools[name]
        checked = check_arguments(tool.schema, arguments, self._argument_aliases.get(name, {}), images)
        return CheckedCall(tool=tool, arguments=checked.values, ignored=checked.ignored)

    async def _injected(self, tool: str, kind: ErrorKind) -> ToolResult:
        assert self._faults is not None
        if kind is ErrorKind.TIMEOUT and self._faults.timeout_s:
            await asyncio.sleep(self._faults.timeout_s)
        return replace(_failed(tool, unavailable(tool, kind)), injected=True)

    async def _serve(self, call: CheckedCall, images: ImageBook, key: CallKey) -> tuple[ToolOutput, bool]:
        """``(output, cached)``."""
        if self._replay is not None:
            return await self._replay.outcome(await call_key(call, images), key, call.tool.name), False
        if self._ended is not None and not self._ended.done():
            # The tools still close what they held: a new loop would be given connections of the old one.
            await asyncio.shield(asyncio.wrap_future(self._ended))
        self.start()
        assert self._workshop is not None
        return await self._workshop.serve(call, images)


def _stop(workshop: Workshop, ended: Future[None]) -> None:
    try:
        workshop.stop()
    finally:
        ended.set_result(None)


def _failed(tool: str | None, error: ToolError) -> ToolResult:
    return ToolResult(tool=tool, text=f"Error: {error.kind}. {error.message}", error=error.kind)


def _succeeded(call: CheckedCall, output: ToolOutput, cached: bool, images: ImageBook) -> ToolResult:
    notes = [output.note] if output.note else []
    if call.ignored:
        notes.append(f"Unknown arguments ignored: {', '.join(repr(name[:40]) for name in call.ignored[:4])}.")
    parts = [output.text, *notes]
    if output.image is not None:
        parts.insert(0, f"{images.next_name}: {output.image.width}x{output.image.height} pixels.")
    return ToolResult(
        tool=call.tool.name,
        text=" ".join(part for part in parts if part),
        image=output.image,
        cached=cached,
        hits=output.hits,
        note=" ".join(notes) or None,
    )


def flat(places: ToolPlaces) -> list[Tool]:
    """The tools of all places, in order."""
    tools: list[Tool] = []
    for place in places.values() if isinstance(places, Mapping) else places:
        if isinstance(place, Sequence):
            tools += place
        elif place is not None:
            tools.append(place)
    return tools


def _check_tools(tools: Sequence[Tool]) -> None:
    if not tools:
        raise ConfigurationError("The tool list is empty: give at least one tool.")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"Two tools have one name in {names}: give each its own.")
    for tool in tools:
        if isinstance(tool, LimitedTool) and tool.backend_limit < 1:
            raise ConfigurationError(f"The backend_limit of {tool.name} is {tool.backend_limit}: set 1 or more.")
        try:
            function = tool.schema["function"]
            named, properties = function["name"], function["parameters"]["properties"]
            json.dumps(tool.schema)
        except (KeyError, TypeError) as error:
            message = f"The schema of {tool.name} lacks {error}: give a function schema with parameters.properties."
            raise ConfigurationError(message) from error
        if named != tool.name or not isinstance(properties, Mapping):
            raise ConfigurationError(f"The schema of {tool.name} is that of {named}: make the names equal.")
