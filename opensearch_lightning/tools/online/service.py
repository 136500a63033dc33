"""One HTTP service that the operator configured: its limits, its key, and what its failures are called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.backends import Backend, BackendPolicy
from opensearch_lightning.tools.base_url import base_url, proxy_of
from opensearch_lightning.tools.download import check_status
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.types import ErrorKind


class Service:
    """Requests to one base URL; for one event loop until :meth:`aclose`.

    The address comes from the configuration, never from a model or a page, and may be a private one. Redirects are not
    followed: a key is sent to no other place than the one configured. No error repeats what a server said.

    Args:
        name: of the service, for messages.
        address: what paths are under, without a user name or query. It is reached through the proxy that the
            environment names (``HTTPS_PROXY``, ``NO_PROXY``), which this machine itself never is.
        key: is taken out of answers that hold it, and named in messages by its variable.
        policy: limits, retries and breaker; ``None`` for the defaults.
        timeout_s: seconds of a request where the policy sets none.
        max_bytes: most bytes of an answer, unpacked.

    Raises:
        ConfigurationError: a URL or a limit that cannot be.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        key: Secret | None = None,
        policy: BackendPolicy | None = None,
        timeout_s: float = 20.0,
        max_bytes: int = 20_000_000,
    ) -> None:
        if not timeout_s > 0 or max_bytes < 1:
            raise ConfigurationError(f"timeout_s of {name} is {timeout_s}, max_bytes {max_bytes}: set both above 0.")
        self.name = name
        self._address = base_url(name, address)
        self._proxy = proxy_of(self._address)
        self._key = key
        self._policy = policy or BackendPolicy()
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None
        self._backend: Backend | None = None

    async def request(
        self,
        method: str,
        path: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        payload: Any = None,
        data: bytes | None = None,
    ) -> Any:
        """The JSON that the service answers.

        Args:
            method: HTTP method.
            path: what follows the base URL, as it is.
            headers: further ones; a key belongs here.
            payload: body, sent as JSON.
            data: body, as bytes.

        Raises:
            ToolError: of the kind of what went wrong.
        """
        answer = await self.fetch(method, path, headers=headers, payload=payload, data=data)
        return self._parse(answer)

    async def fetch(
        self,
        method: str,
        path: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        payload: Any = None,
        data: bytes | None = None,
    ) -> bytes:
        """The bytes that the service answers; arguments and errors as :meth:`request`."""
        if self._backend is None:
            self._backend = Backend(self._policy, timeout_s=self._timeout_s)

        request = {"headers": headers, "json": payload, "data": data}
        return await self._backend.call(partial(self._attempt, method, path, request))

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session, self._backend = self._session, None, None
        if session is not None:
            await session.close()

    async def _attempt(self, method: str, path: str, request: Mapping[str, Any], timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(method, path, request)
        except TimeoutError:
            raise ToolError(ErrorKind.TIMEOUT, f"{self.name} did not answer in time.") from None
        except aiohttp.ClientConnectorError:
            raise ToolError(ErrorKind.UNREACHABLE, f"{self.name} cannot be reached.") from None
        except (aiohttp.ClientError, ValueError) as error:
            # from None, and no text of theirs: it may hold a header
            what = type(error).__name__
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} did not answer rightly ({what}).") from None

    async def _send(self, method: str, path: str, request: Mapping[str, Any]) -> bytes:
        if self._session is None:
            # The policy limits calls at once, not the pool.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        url = self._address + path
        async with self._session.request(method, url, allow_redirects=False, proxy=self._proxy, **request) as response:
            self._check(response)
            content = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                content += chunk
                if len(content) > self._max_bytes:
                    raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} answered more than {self._max_bytes} bytes.")
            return bytes(content)

    def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status in (401, 403):
            variable = f" in {self._key.variable}" if self._key is not None else ""
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} refused the key{variable}.")
        if 300 <= response.status < 400:
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} redirects; its address must be the final one.")
        check_status(response)

    def _parse(self, answer: bytes) -> Any:
        try:
            parsed = json.loads(answer.decode())
            return parsed if self._key is None else self._key.redact(parsed)
        except (ValueError, RecursionError):
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} answered something that is no JSON.") from None
