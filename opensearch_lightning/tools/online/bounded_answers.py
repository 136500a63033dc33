"""A limit on the size of answers, for clients of httpx2 that read them whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2

from opensearch_lightning.errors import ToolError
from opensearch_lightning.types import ErrorKind


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, name: str, max_bytes: int) -> None:
        self._stream = stream
        self._name = name
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._max_bytes
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise ToolError(
                    ErrorKind.BACKEND_ERROR, f"The {self._name} answered more than {self._max_bytes} bytes."
                )
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def bounded(name: str, max_bytes: int) -> Callable[[httpx2.Response], Awaitable[None]]:
    """A hook for responses that lets reading a longer body raise ToolError ``backend_error``, naming the service."""

    async def hook(response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, name, max_bytes)

    return hook
