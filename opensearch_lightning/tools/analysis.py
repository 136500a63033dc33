"""Words of a text as the search index and the summaries count them: lower case, unaccented, stemmed; CJK as bigrams."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tantivy import TextAnalyzer

_CJK_RUN = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")

STOPWORDS = frozenset(
    "a an and are as at be by did do does for from had has have how in is it its of on or that the their this to was"
    " were what when where which who whom whose why will with".split()
)


@cache
def _analyzer() -> TextAnalyzer:
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    return (
        TextAnalyzerBuilder(Tokenizer.simple())
        .filter(Filter.lowercase())
        .filter(Filter.ascii_fold())
        .filter(Filter.remove_long(64))
        .filter(Filter.stemmer("english"))
        .build()
    )


def _bigrams(match: re.Match[str]) -> str:
    run = match.group()
    if len(run) == 1:
        return f" {run} "
    return " " + " ".join(run[i : i + 2] for i in range(len(run) - 1)) + " "


def words(text: str) -> list[str]:
    """Every word of ``text`` in order, in the form the index holds (tantivy's analyzer; Chinese, Japanese and Korean
    runs as overlapping pairs of characters, since they carry no spaces).
    """
    tokens: list[str] = _analyzer().analyze(_CJK_RUN.sub(_bigrams, text))
    return tokens


def query_words(query: str) -> list[str]:
    """Distinct words of a query without stop words; with them when nothing else is left."""
    distinct = list(dict.fromkeys(words(query)))
    return [word for word in distinct if word not in STOPWORDS] or distinct
