"""What a search of the web is made of: an engine that finds pages, a reader, and a summarizer.

Each part has a ``name`` for messages, one method that does its work, and ``aclose``, after which the work goes on with
new connections, also on another event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class WebHit:
    """One result of a search engine; ``title`` and ``snippet`` may be empty."""

    title: str
    url: str
    snippet: str


@dataclass(frozen=True, kw_only=True)
class WebPage:
    """A page as text or Markdown; ``title`` may be empty, ``text`` is not."""

    title: str
    text: str


class SearchEngine(Protocol):
    """Finds pages."""

    @property
    def name(self) -> str:
        """Of the service."""
        ...

    async def search(self, query: str, *, language: str, limit: int) -> list[WebHit]:
        """At most ``limit`` hits, best first; none is no error.

        Raises:
            ToolError: the engine failed.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class PageReader(Protocol):
    """Reads pages. Their URLs come from outside: a reader sees to it that only public addresses are contacted."""

    @property
    def name(self) -> str:
        """Of the service."""
        ...

    async def read(self, url: str) -> WebPage:
        """The page behind ``url``.

        Raises:
            ToolError: ``invalid_argument`` for a URL that may not be read; else the kind of what went wrong.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class PageSummarizer(Protocol):
    """Says in a few sentences what a page holds for a query."""

    @property
    def name(self) -> str:
        """Of the service."""
        ...

    async def summarize(self, query: str, title: str, text: str) -> str:
        """Summary of a page's ``text`` for ``query``; not empty.

        Raises:
            ToolError: the summarizer failed.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
