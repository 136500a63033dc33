"""Readers of pages whose URLs come from a search engine: Jina Reader, or fetching from this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.download import Address, Downloader, check_public, is_public
from opensearch_lightning.tools.formatting import encodable
from opensearch_lightning.tools.online.page_text import page_text
from opensearch_lightning.tools.online.service import Service
from opensearch_lightning.tools.online.web_protocol import WebPage
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

_JINA_LONGEST_S = 180


class JinaReader:
    """Pages as Markdown by ``GET https://r.jina.ai/<url>``.

    A URL that does not name a public address is not sent there.

    Args:
        api_key_env: environment variable that holds the key; ``None`` for the slower service without one.
        base_url: address of the service.
        resolve_names: whether names of pages are looked up before the service gets them. Set ``False`` where this
            machine reaches the internet through a proxy alone and cannot look them up; then only what a URL itself
            shows is refused: addresses that are not public, ``localhost``, names of local networks.
        policy: limits, retries and breaker of the service.
        timeout_s: seconds of a page, retries included, where the policy sets none. The service is asked for a second
            less, so that what a slow page holds by then still comes; asked for 20 s or more, it waits until a page
            loads nothing further.
        max_bytes: most bytes of an answer.

    Raises:
        MissingKeyError: the variable is not set.
        ConfigurationError: a URL, a limit or a variable's name that cannot be.
    """

    name = "Jina Reader"

    def __init__(
        self,
        *,
        api_key_env: str | None = "JINA_API_KEY",
        base_url: str = "https://r.jina.ai",
        resolve_names: bool = True,
        policy: BackendPolicy | None = None,
        timeout_s: float = 15.0,
        max_bytes: int = 5_000_000,
    ) -> None:
        key = None if api_key_env is None else Secret.from_environment(api_key_env)
        self._service = Service(self.name, base_url, key=key, policy=policy, timeout_s=timeout_s, max_bytes=max_bytes)
        self._key = key
        self._resolve_names = resolve_names
        seconds = (policy.timeout_s if policy is not None else None) or timeout_s
        self._page_seconds = min(max(1, int(seconds) - 1), _JINA_LONGEST_S)

    async def read(self, url: str) -> WebPage:
        """The page behind ``url``.

        Raises:
            ToolError: ``invalid_argument`` for a URL that is not sent; ``backend_error`` too for a page that the
                service found broken or empty.
        """
        await check_public(url, resolve=self._resolve_names)
        headers = {"Accept": "application/json", "X-Timeout": str(self._page_seconds)}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        # Encoded as a whole: the service decodes once, and no part of the URL is taken for a part of the request's.
        answer = await self._service.request("GET", "/" + quote(url.strip(), safe=""), headers=headers)
        return self._page(answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()

    def _page(self, answer: Any) -> WebPage:
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("code", 200) != 200:
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} answered without a page.")
        if str(data.get("warning") or "").startswith("Target URL returned error"):
            raise ToolError(ErrorKind.BACKEND_ERROR, "The page itself answered with an error.")
        title, text = data.get("title"), data.get("content")
        if not isinstance(text, str) or not text.strip():
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} found no text in the page.")
        return WebPage(title=encodable(title).strip() if isinstance(title, str) else "", text=encodable(text))


class DirectReader:
    """Fetches pages from this machine, from public addresses alone, and takes the text out of HTML (trafilatura).

    Plain text, Markdown and JSON come as they are; other kinds are not read.

    Args:
        timeout_s: seconds of a download, redirects included.
        max_bytes: most bytes of a page.
        max_html_chars: the rest of a longer page is not parsed, which takes about a second per million.
        allowed: which addresses may be contacted.

    Raises:
        ConfigurationError: a limit that is not positive.
    """

    name = "page reader"

    def __init__(
        self,
        *,
        timeout_s: float = 15.0,
        max_bytes: int = 5_000_000,
        max_html_chars: int = 1_000_000,
        allowed: Callable[[Address], bool] = is_public,
    ) -> None:
        if importlib.util.find_spec("trafilatura") is None:
            raise ConfigurationError("DirectReader needs trafilatura: pip install 'opensearch-lightning[online]'.")
        if max_html_chars < 1:
            raise ConfigurationError(f"max_html_chars is {max_html_chars}: set 1 or more.")
        self._downloader = Downloader(timeout_s=timeout_s, max_bytes=max_bytes, allowed=allowed)
        self._max_html_chars = max_html_chars
        self._parsing: asyncio.Semaphore | None = None

    async def read(self, url: str) -> WebPage:
        """The page behind ``url``.

        Raises:
            ToolError: ``invalid_argument`` for a URL that may not be contacted; ``backend_error`` too for a page of
                another kind or without text.
        """
        page = await self._downloader.get(url)
        if self._parsing is None:
            # Parsing is work for a core: more at once would only take longer together.
            self._parsing = asyncio.Semaphore(os.cpu_count() or 1)
        async with self._parsing:
            return await in_thread(lambda: page_text(page, max_html_chars=self._max_html_chars))

    async def aclose(self) -> None:
        """Close the connections."""
        self._parsing = None
        await self._downloader.aclose()
