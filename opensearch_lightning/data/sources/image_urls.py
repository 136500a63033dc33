"""Images that rows name by URL."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.errors import ConfigurationError, ToolError


def fetch_image(url: str, *, timeout_s: float = 20.0, allowed: Callable[[Any], bool] | None = None) -> bytes:
    """The bytes behind ``url``, from a public address and within the limits of a download.

    Args:
        url: what the row holds.
        timeout_s: seconds, redirects included.
        allowed: which addresses may be contacted; ``None``: those of the internet at large.

    Raises:
        UnusableRow: the URL may not be contacted, or nothing came.
        ConfigurationError: aiohttp is missing.
    """
    try:
        # Imported late: aiohttp is needed by those alone who fetch.
        from opensearch_lightning.tools import download
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Images by URL need {error.name}: pip install 'opensearch-lightning[online]'."
        ) from error

    async def get() -> bytes:
        downloader = download.Downloader(timeout_s=timeout_s, allowed=allowed or download.is_public)
        try:
            return (await downloader.get(url)).body
        finally:
            await downloader.aclose()

    try:
        # A thread of its own: the caller may stand in a running loop, as in a notebook.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, get()).result()
    except ToolError as error:
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {url!r:.200} was not fetched: {error.message}") from error
