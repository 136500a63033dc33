"""The search part of the reward (Eq. 9, ``r_query``): four dimensions read from words alone."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from opensearch_lightning.rewards.calls import called_arguments, called_tool
from opensearch_lightning.tools.analysis import STOPWORDS
from opensearch_lightning.types import INFRASTRUCTURE_ERRORS, ErrorKind, Step, Task

# Kind of each search tool, and the argument that says what to look for.
_SEARCHES = {"text_search": ("text", "q"), "image_search": ("image", "url")}
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search of a trajectory.

    ``query`` is what was looked for, as the policy wrote it: a text, or the name of an image. ``words`` are the
    content words of a text query, or the one image name of an image search. ``known`` are the content words that the
    question and the observations before this search had shown.
    """

    kind: str
    query: str
    words: frozenset[str]
    known: frozenset[str]
    text: str
    hits: int | None
    error: ErrorKind | None


@dataclass(frozen=True, kw_only=True)
class QueryQuality:
    """The four dimensions, each in [0, 1]."""

    relevance: float
    progression: float
    signal: float
    complementarity: float

    @property
    def mean(self) -> float:
        """The score: their plain mean."""
        return (self.relevance + self.progression + self.signal + self.complementarity) / 4


def content_words(text: str) -> frozenset[str]:
    """Words of ``text`` that carry meaning: NFKC, case folded, stop words out; CJK characters one by one."""
    return frozenset(_WORD.findall(unicodedata.normalize("NFKC", text).casefold())) - STOPWORDS


def searches(question: str, steps: Sequence[Step]) -> list[Search]:
    """The text and image searches among ``steps``, in order, failed ones included."""
    found: list[Search] = []
    known = content_words(question)
    for step in steps:
        if (search := _search(step, known)) is not None:
            found.append(search)
        if step.result is not None and step.error is None:
            known |= content_words(step.result.text)
    return found


class LexicalQueryJudge:
    """Judges the searches of a trajectory from their words, without a language model.

    With ``S`` the searches, ``Q_i`` the content words of search *i* (an image search: its image name), ``known_i``
    those that the question and earlier observations had shown:

    - relevance: mean over ``S`` of ``|Q_i ∩ known_i| / |Q_i|``; an image search counts 1 unless its call was wrong.
    - progression: mean over ``S`` of ``1 − max_{j<i} Jaccard(Q_i, Q_j)`` over earlier searches of the same kind (the
      first counts 1): repeating oneself earns nothing.
    - signal to noise: mean over the searches that came back of the share of result lines that hold at least half of
      ``Q_i``; an image search counts 1 with hits and 0 without; a wrong call counts 0. 0 when none came back.
    - complementarity: half for a text search that was carried out, half for an image search.

    The score is their mean, and 0 for a trajectory that never searched. A timeout or an unreachable backend is not
    held against the query. It is the embedded :class:`~opensearch_lightning.rewards.QueryJudge`; it never fails.
    """

    name = "lexical"

    async def score(self, task: Task, steps: Sequence[Step]) -> float:
        """Score of ``steps`` in [0, 1]."""
        quality = self.quality(task, steps)
        return quality.mean if quality is not None else 0.0

    def quality(self, task: Task, steps: Sequence[Step]) -> QueryQuality | None:
        """The four dimensions, or ``None`` when ``steps`` hold no search."""
        found = searches(task.question, steps)
        if not found:
            return None
        returned = [_signal(search) for search in found if search.error not in INFRASTRUCTURE_ERRORS]
        carried_out = {search.kind for search in found if not _is_wrong_call(search)}
        return QueryQuality(
            relevance=_mean([_relevance(search) for search in found]),
            progression=_mean([1.0 - _closest(search, found[:i]) for i, search in enumerate(found)]),
            signal=_mean(returned),
            complementarity=len(carried_out) / 2,
        )


def _search(step: Step, known: frozenset[str]) -> Search | None:
    action, result = step.action, step.result
    if action.kind != "tool_call" or result is None:
        return None
    tool = called_tool(step)
    if tool not in _SEARCHES:
        return None
    kind, argument = _SEARCHES[tool]
    query = str(called_arguments(step).get(argument, ""))
    words = content_words(query) if kind == "text" else frozenset({query})
    return Search(
        kind=kind, query=query, words=words, known=known, text=result.text, hits=result.hits, error=step.error
    )


def _is_wrong_call(search: Search) -> bool:
    return search.error is not None and search.error not in INFRASTRUCTURE_ERRORS


def _relevance(search: Search) -> float:
    if search.kind == "image":
        return 0.0 if _is_wrong_call(search) else 1.0
    return len(search.words & search.known) / len(search.words) if search.words else 0.0


def _closest(search: Search, earlier: Sequence[Search]) -> float:
    return max((_jaccard(search.words, other.words) for other in earlier if other.kind == search.kind), default=0.0)


def _signal(search: Search) -> float:
    if search.error is not None or search.hits == 0:
        return 0.0
    if search.kind == "image":
        return 1.0
    lines = [content_words(line) for line in search.text.splitlines() if line.strip()]
    return _mean([float(2 * len(words & search.words) >= len(search.words) > 0) for words in lines])


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
