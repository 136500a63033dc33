"""Images that rows name by URL."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.errors import ToolError


def fetch_image(url: str, *, timeout_s: float = 20.0, allowed: Callable[[Any], bool] | None = None) -> bytes:
    """The bytes behind ``url``, from a public address and within the limits of a download.

    Args:
        url: what the row holds.
        timeout_s: seconds, redirects included.
        allowed: which addresses may be contacted; ``None``: those of the internet at large.

    Raises:
        UnusableRow: the URL may not be contacted, or nothing came.
    """
    try:
        # A thread of its own: the caller may stand in a running loop, as in a notebook.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, _get(url, timeout_s, allowed)).result()
    except ToolError as error:
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {url!r:.200} was not fetched: {error.message}") from error


async def _get(url: str, timeout_s: float, allowed: Callable[[Any], bool] | None) -> bytes:
    # Imported late: aiohttp is needed by those alone who fetch.
    from opensearch_lightning.tools.download import Downloader, is_public

    downloader = Downloader(timeout_s=timeout_s, allowed=allowed or is_public)
    try:
        return (await downloader.get(url)).body
    finally:
        await downloader.aclose()
