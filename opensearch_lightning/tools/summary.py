"""Extractive, query-focused summaries: the sentences of a page that say most about a query."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools.analysis import query_words, words

# A stop ends a sentence before white space and a capital or digit, unless it follows an initial or an abbreviation.
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:Mr|Dr|St|vs|No|Ft|Mt))(?<!\b(?:Mrs|etc|i\.e|e\.g))[.!?][\"')\]]*\s+(?=[^\sa-z])"
    r"|(?<=[\u3002\uff01\uff1f])|\n+"
)
_TITLE_WEIGHT = 0.1

_Page = list[tuple[str, frozenset[str]]]


def sentences(text: str) -> list[str]:
    """Sentences of plain text, white space collapsed; line breaks end a sentence too."""
    found, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        found.append(text[start:end])
        start = end
    found.append(text[start:])
    return [clean for part in found if (clean := " ".join(part.split()))]


class ExtractiveSummarizer:
    """Picks the sentences that share most with a query.

    Each shared word counts by its rarity among the page's sentences, a word of the title hardly (every sentence is
    about the title); earlier sentences win ties, and the first stands when nothing is shared. Pages are kept cut into
    sentences, so that the next query finds them ready. Safe to share by threads.

    Args:
        max_sentences: 1 to 4, printed in the order of the page.
        max_chars: a longer summary is cut there.
        max_page_chars: the rest of a longer page is not looked at.
        pages_kept: how many pages are kept cut.
    """

    def __init__(
        self, max_sentences: int = 1, *, max_chars: int = 400, max_page_chars: int = 50_000, pages_kept: int = 1024
    ) -> None:
        if not 1 <= max_sentences <= 4:
            raise ConfigurationError(f"max_sentences is {max_sentences}: set 1 to 4.")
        self._max_sentences = max_sentences
        self._max_chars = max_chars
        self._max_page_chars = max_page_chars
        self._pages_kept = pages_kept
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._lock = threading.Lock()

    def summarize(self, query: str, title: str, text: str) -> str:
        """Summary of a page of plain ``text`` for ``query``; empty only for an empty page."""
        page = self._cut(text[: self._max_page_chars])
        weights = self._weights(query_words(query), set(words(title)), page)
        order = sorted(range(len(page)), key=lambda i: (-_score(weights, page[i][1]), i))
        best = order[: self._max_sentences]
        chosen = sorted(i for i in best if i == best[0] or _score(weights, page[i][1]) > 0)
        summary = " ".join(page[i][0] for i in chosen)
        return summary if len(summary) <= self._max_chars else summary[: self._max_chars - 3].rstrip() + "..."

    def _cut(self, text: str) -> _Page:
        with self._lock:
            page = self._pages.get(text)
            if page is not None:
                self._pages.move_to_end(text)
                return page
        page = [(sentence, frozenset(words(sentence))) for sentence in sentences(text)]
        with self._lock:
            self._pages[text] = page
            while len(self._pages) > self._pages_kept:
                self._pages.popitem(last=False)
        return page

    @staticmethod
    def _weights(query: Iterable[str], title: set[str], page: _Page) -> dict[str, float]:
        counts = Counter(word for _, known in page for word in known)
        return {
            word: math.log1p(len(page) / counts[word]) * (_TITLE_WEIGHT if word in title else 1.0)
            for word in query
            if counts[word]
        }


def _score(weights: dict[str, float], sentence: frozenset[str]) -> float:
    return sum(weight for word, weight in weights.items() if word in sentence)
