"""Summaries of pages without a model."""

from __future__ import annotations

from functools import partial

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools.formatting import encodable
from opensearch_lightning.tools.summary import ExtractiveSummarizer
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

_PAGES_KEPT = 64


class SentenceSummarizer:
    """Summaries made of a page's own sentences, on this machine.

    Args:
        max_sentences: 1 to 4.
        max_chars: a longer summary is cut there.
        max_page_chars: the rest of a longer page is not looked at.

    Raises:
        ConfigurationError: ``max_sentences`` out of range.
    """

    name = "extractive summary"

    def __init__(self, max_sentences: int = 2, *, max_chars: int = 600, max_page_chars: int = 50_000) -> None:
        self._summarizer = ExtractiveSummarizer(
            max_sentences, max_chars=max_chars, max_page_chars=max_page_chars, pages_kept=_PAGES_KEPT
        )

    async def summarize(self, query: str, title: str, text: str) -> str:
        """The sentences of ``text`` that say most about ``query``.

        Raises:
            ToolError: ``backend_error`` for a page without any.
        """
        parts = (encodable(part) for part in (query, title, text))
        summary = await in_thread(partial(self._summarizer.summarize, *parts))
        if not summary:
            raise ToolError(ErrorKind.BACKEND_ERROR, "The page holds no sentence.")
        return summary

    async def aclose(self) -> None:
        """Nothing is held open."""
