"""Runs checked calls: turns, time limits, the cache, and one run for equal calls."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image

from opensearch_lightning.errors import ToolError
from opensearch_lightning.pictures import as_rgb
from opensearch_lightning.tools.arguments import image_arguments
from opensearch_lightning.tools.backends import Backend, BackendPolicy
from opensearch_lightning.tools.cache import ResultCache, cache_key
from opensearch_lightning.tools.formatting import encodable
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.protocol import ClosableTool, LimitedTool, Tool, ToolOutput
from opensearch_lightning.tools.single_flight import SingleFlight
from opensearch_lightning.tools.threads import LoopThread, in_thread
from opensearch_lightning.types import ErrorKind

logger = logging.getLogger(__name__)

# A search reads its pages side by side, each on a connection to the reader and to the model.
_FILES_A_CALL = 10
_MOST_HITS = 2**63

_FAILED = {
    ErrorKind.TIMEOUT: "did not answer",
    ErrorKind.RATE_LIMITED: "refused, too many requests",
    ErrorKind.UNREACHABLE: "cannot be reached",
    ErrorKind.BACKEND_ERROR: "failed",
}


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """A call whose arguments passed the tool's schema; ``ignored`` are names it does not have."""

    tool: Tool
    arguments: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


async def call_key(call: CheckedCall, images: ImageBook, namespace: str | None = None) -> str:
    """Key of a call's content: equal for equal arguments and equal pictures, whatever their names.

    With a ``namespace`` it also says which tool of that name it is, as far as results depend on it.
    """
    names = image_arguments(call.tool.schema, call.arguments)
    for shown in (call.arguments[name] for name in names):
        if not images.is_digested(shown):
            # In a thread: the pixels of a large image take a while.
            await in_thread(partial(images.digest, shown))
    digests = {name: images.digest(call.arguments[name]) for name in names}
    tool: Any = call.tool.name
    if namespace is not None:
        tool = [call.tool.name, call.tool.backend, call.tool.schema, getattr(call.tool, "variant", "")]
    return cache_key(namespace or "", tool, call.arguments, digests)


class Workshop:
    """The loop on which tools run, with its turns and its shared flights."""

    def __init__(
        self,
        tools: Sequence[Tool],
        timeout_s: float,
        max_concurrency: int,
        cache: ResultCache | None,
        policies: Mapping[str, BackendPolicy],
    ) -> None:
        _allow_open_files(_FILES_A_CALL * max_concurrency)
        self._cache = cache
        self._flights: SingleFlight[ToolOutput] = SingleFlight()
        turns = asyncio.Semaphore(max_concurrency)
        limits: dict[str, int] = {}
        for tool in tools:
            limit = tool.backend_limit if isinstance(tool, LimitedTool) else max_concurrency
            limits[tool.backend] = min(limit, limits.get(tool.backend, limit))
        self._backends: dict[str, Backend] = {}
        for backend, limit in limits.items():
            policy = policies.get(backend, BackendPolicy())
            own = asyncio.Semaphore(min(limit, policy.max_concurrency or limit))
            self._backends[backend] = Backend(policy, timeout_s=timeout_s, own=own, shared=turns)
        self._closable = [tool for tool in tools if isinstance(tool, ClosableTool)]
        self._thread = LoopThread()

    def stop(self) -> None:
        """Cancel what runs, close what tools hold open, and end the loop's thread."""
        self._thread.stop([tool.aclose for tool in self._closable])

    async def serve(self, call: CheckedCall, images: ImageBook) -> tuple[ToolOutput, bool]:
        """``(output, cached)`` of a checked call."""
        return await self._thread.run(self._look_up(call, images))

    async def _look_up(self, call: CheckedCall, images: ImageBook) -> tuple[ToolOutput, bool]:
        if self._cache is None:
            return await self._run(call, images), False
        key = await call_key(call, images, self._cache.namespace)
        kept = await self._cache.get(key)
        if kept is not None:
            return kept, True
        return await self._flights.join(key, lambda: self._run_and_keep(key, call, images))

    async def _run_and_keep(self, key: str, call: CheckedCall, images: ImageBook) -> ToolOutput:
        assert self._cache is not None
        output = await self._run(call, images)
        if not output.partial:
            await self._cache.put(key, output)
        return output

    async def _run(self, call: CheckedCall, images: ImageBook) -> ToolOutput:
        return await self._backends[call.tool.backend].call(partial(_attempt, call, images))


def _allow_open_files(count: int) -> None:
    """Let the process hold so many connections, as far as the system permits: the usual limit is for one at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < count:
            logger.warning("Calls may need %d open files at once, %d are allowed: raise `ulimit -n`", count, allowed)


async def _attempt(call: CheckedCall, images: ImageBook, timeout_s: float) -> ToolOutput:
    """One try, which ends within ``timeout_s`` whatever the tool does."""
    task = asyncio.ensure_future(_carry_out(call, images))
    task.add_done_callback(_retrieve)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        # Not awaited: a tool that ignores its cancellation holds up nobody.
        task.cancel()
    if not done:
        raise unavailable(call.tool.name, ErrorKind.TIMEOUT)
    try:
        output = task.result()
        if (fault := _fault(output)) is None:
            return await _usable(output)
    except ToolError as error:
        raise _typed(error) from error
    except BaseException as error:
        logger.warning("The tool %s raised on %s", call.tool.name, dict(call.arguments), exc_info=error)
        raise unavailable(call.tool.name, ErrorKind.BACKEND_ERROR) from error
    logger.warning("The tool %s returned %s", call.tool.name, fault)
    raise unavailable(call.tool.name, ErrorKind.BACKEND_ERROR)


async def _carry_out(call: CheckedCall, images: ImageBook) -> ToolOutput:
    try:
        # A copy: what a tool does to its arguments is not to be in the next try, nor in the recording.
        return await call.tool.run(copy.deepcopy(dict(call.arguments)), images)
    except (KeyboardInterrupt, SystemExit) as error:
        # A task hands these on to its loop, whose end would leave every other call waiting.
        raise RuntimeError(f"the tool tried to end the process: {error!r}") from error


def _fault(output: object) -> str | None:
    """What keeps ``output`` from being given to the policy."""
    if not isinstance(output, ToolOutput):
        return f"{type(output)} instead of a ToolOutput"
    if not isinstance(output.text, str) or not isinstance(output.note, str | None):
        return f"a text of {type(output.text)} with a note of {type(output.note)}"
    if output.hits is not None and (type(output.hits) is not int or not 0 <= output.hits < _MOST_HITS):
        return f"{output.hits!r} hits"
    if output.image is None:
        return None
    if not isinstance(output.image, Image.Image):
        return f"an image of {type(output.image)} instead of a PIL image"
    return None if min(output.image.size) > 0 else f"an image of {output.image.size} pixels"


async def _usable(output: ToolOutput) -> ToolOutput:
    """``output`` with a text that can be written and a picture that is decoded.

    Raises:
        Exception: what Pillow raises on a picture that is closed, or on a file that is broken.
    """
    image = output.image
    if image is not None and (type(image) is not Image.Image or image.mode != "RGB"):
        image = await in_thread(partial(as_rgb, image))
    if image is not None:
        image.load()
    note = None if output.note is None else encodable(output.note)
    return replace(output, text=encodable(output.text), image=image, note=note)


def _typed(error: ToolError) -> ToolError:
    """A tool's error as the closed list and the clock know it."""
    kind = ErrorKind(error.kind) if error.kind in set(ErrorKind) else ErrorKind.BACKEND_ERROR
    wait = error.retry_after_s
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
        wait = None
    return ToolError(kind, encodable(str(error.message)), retry_after_s=wait)


def unavailable(tool: str, kind: ErrorKind) -> ToolError:
    """The error of a tool whose infrastructure failed, in the words the policy gets."""
    return ToolError(kind, f"The tool {tool} {_FAILED[kind]}; try again or go on another way.")


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
