"""``text_search`` on the web: an engine finds pages, and each is read and summarized for the query."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.formatting import passages
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.online.sentence_summary import SentenceSummarizer
from opensearch_lightning.tools.online.web_protocol import PageReader, PageSummarizer, SearchEngine, WebHit, WebPage
from opensearch_lightning.tools.protocol import Probe, ToolOutput
from opensearch_lightning.tools.schemas import text_search_schema
from opensearch_lightning.types import ErrorKind

logger = logging.getLogger(__name__)

_MAX_QUERY_CHARS = 2000
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*")
_WHY = {
    ErrorKind.TIMEOUT: "timeout",
    ErrorKind.RATE_LIMITED: "too many requests",
    ErrorKind.UNREACHABLE: "unreachable",
    ErrorKind.INVALID_ARGUMENT: "no public web page",
}


class WebSearch:
    """``text_search`` by a search engine, a page reader and a summarizer.

    All pages are read and summarized side by side, each within ``page_timeout_s``. A page that cannot be read or
    summarized does not fail the search: its passage says so and holds the engine's snippet, or sentences of the page.
    Such a result is ``partial``. The search fails only where the engine does.

    A call takes at most the engine's time and ``page_timeout_s``, with the waits for a turn at the engine on top. What
    the executor allows (``timeout_s``, or that of the ``BackendPolicy`` of ``text_search``) must be more than both
    together: a call that it cuts short gives the policy nothing. Retries at the executor repeat the whole search, paid
    pages included; those of a part (its own ``policy``) repeat that part.

    Args:
        engine: finds pages.
        reader: turns pages into text.
        summarizer: shortens texts.
        top_k: passages when a call does not say, 1 to 20.
        page_timeout_s: seconds of one page, reading and summary, waits for a turn included.

    Raises:
        ConfigurationError: a value out of range.
    """

    name = "text_search"
    backend = "text_search"

    def __init__(
        self,
        engine: SearchEngine,
        reader: PageReader,
        summarizer: PageSummarizer,
        *,
        top_k: int = 5,
        page_timeout_s: float = 30.0,
    ) -> None:
        if not page_timeout_s > 0:
            raise ConfigurationError(f"page_timeout_s is {page_timeout_s}: set seconds above 0.")
        self.schema: Mapping[str, Any] = text_search_schema(top_k)
        self.variant = ", ".join(part.name for part in (engine, reader, summarizer))
        self._engine = engine
        self._reader = reader
        self._summarizer = summarizer
        self._page_timeout_s = page_timeout_s
        self._fallback = SentenceSummarizer()

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call.

        Raises:
            ToolError: the engine failed, or ``invalid_argument`` for a query or a language that cannot be searched.
        """
        query, language = _query(arguments["q"]), _language(arguments["hl"])
        hits = await self._engine.search(query, language=language, limit=arguments["top_k"])
        by_url: dict[str, WebHit] = {}
        for hit in hits:
            by_url.setdefault(hit.url, hit)
        chosen = list(by_url.values())[: arguments["top_k"]]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._passage(query, hit)) for hit in chosen]
        found = [task.result() for task in tasks]
        return ToolOutput(
            text=passages(passage for passage, _ in found),
            hits=len(found),
            partial=any(failed for _, failed in found),
        )

    async def aclose(self) -> None:
        """Close the connections of all parts; a later call opens new ones."""
        for part in (self._engine, self._reader, self._summarizer):
            await part.aclose()

    def probes(self) -> Mapping[str, Probe]:
        """One real and cheap try of each part, by its name; each raises ToolError on failure."""
        return {
            self._engine.name: self._try_engine,
            self._reader.name: self._try_reader,
            self._summarizer.name: self._try_summarizer,
        }

    async def _try_engine(self) -> None:
        await self._engine.search("example", language="en", limit=1)

    async def _try_reader(self) -> None:
        await self._reader.read("https://example.com")

    async def _try_summarizer(self) -> None:
        text = "This domain is for use in documentation examples. It needs no permission."
        await self._summarizer.summarize("What is the domain for?", "Example Domain", text)

    async def _passage(self, query: str, hit: WebHit) -> tuple[tuple[str, str, str], bool]:
        """``(title, url, summary)`` of one hit, and whether something failed on the way."""
        page: WebPage | None = None
        try:
            async with asyncio.timeout(self._page_timeout_s):
                page = await self._reader.read(hit.url)
                title = hit.title or page.title or hit.url
                return (title, hit.url, await self._summarizer.summarize(query, title, page.text)), False
        except TimeoutError:
            kind = ErrorKind.TIMEOUT
        except ToolError as error:
            kind = error.kind
        except Exception as error:
            # One page fails no search. The type alone: a message may hold what no log should.
            logger.warning("A page of a search failed with %s", type(error).__name__)
            kind = ErrorKind.BACKEND_ERROR
        why = _WHY.get(kind, "failed")
        if page is None:
            return (hit.title or hit.url, hit.url, f"(page not read: {why}) {hit.snippet}"), True
        return (title, hit.url, f"(no summary: {why}; from the page:) {await self._extract(query, hit, page)}"), True

    async def _extract(self, query: str, hit: WebHit, page: WebPage) -> str:
        try:
            return await self._fallback.summarize(query, hit.title, page.text)
        except ToolError:
            return hit.snippet


def _query(query: str) -> str:
    # What the engine would refuse would count as a failure of the engine.
    text = query.strip()
    if not text or len(text) > _MAX_QUERY_CHARS:
        message = f"q has {len(text)} characters; write a query of 1 to {_MAX_QUERY_CHARS}."
        raise ToolError(ErrorKind.INVALID_ARGUMENT, message)
    return text


def _language(code: str) -> str:
    language = code.strip().lower().replace("_", "-")
    if not _LANGUAGE.fullmatch(language):
        raise ToolError(ErrorKind.INVALID_ARGUMENT, f"hl is {code[:40]!r}; write a language code such as en or zh-cn.")
    return language
