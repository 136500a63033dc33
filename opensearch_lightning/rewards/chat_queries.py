"""Search quality by a language model (Eq. 9, ``r_query``; GPT-5.4 in the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rewards.chat_judge import ChatJudge
from opensearch_lightning.rewards.judge_metrics import JudgeMetrics
from opensearch_lightning.rewards.parsing import parse_object, parse_score
from opensearch_lightning.rewards.prompts import FULL_MARK, QUERIES, QUERY_DIMENSIONS
from opensearch_lightning.rewards.queries import Search, searches
from opensearch_lightning.rewards.quoting import cut, quoted
from opensearch_lightning.types import Step, Task


class ChatQueryJudge:
    """Lets a model mark the searches of a trajectory in four dimensions; the score is the mean of the marks.

    It sees the question, the queries and the beginning of what each brought back; no images, and not the answer.

    Args:
        chat: asks the model.
        max_query_chars: the rest of a longer query is not shown to the model.
        max_returned_chars: nor that of a longer result.

    Raises:
        ConfigurationError: a limit below 1.
    """

    def __init__(self, chat: ChatJudge, *, max_query_chars: int = 500, max_returned_chars: int = 1_500) -> None:
        if min(max_query_chars, max_returned_chars) < 1:
            raise ConfigurationError(
                f"max_query_chars is {max_query_chars}, max_returned_chars {max_returned_chars}: set 1 or more."
            )
        self.chat = chat
        self.name = chat.named(QUERIES)
        self._max_query_chars = max_query_chars
        self._max_returned_chars = max_returned_chars

    async def score(self, task: Task, steps: Sequence[Step]) -> float:
        """Score of ``steps`` in [0, 1]; 0 without a search, for which no model is asked.

        Raises:
            JudgeError: the model could not be reached or read.
            JudgeUnavailable: and that too often.
        """
        found = searches(task.question, steps)
        if not found:
            return 0.0
        record = {"question": task.question, "searches": [self._shown(search) for search in found]}
        return await self.chat.ask(QUERIES, quoted(record), self._read)

    def drain(self) -> JudgeMetrics:
        """What was done and spent since this was last called."""
        return self.chat.drain()

    async def aclose(self) -> None:
        """Close connections and the cache's file; a later call opens them again."""
        await self.chat.aclose()

    def _shown(self, search: Search) -> dict[str, str]:
        return {
            "kind": search.kind,
            "query": cut(search.query, self._max_query_chars),
            "outcome": _outcome(search),
            "returned": cut(search.text, self._max_returned_chars),
        }

    def _read(self, text: str) -> float | None:
        record = parse_object(text)
        if self.chat.is_structured or (record is not None and "score" not in record):
            return _mean_mark(record or {})
        return parse_score(text)


def _outcome(search: Search) -> str:
    if search.error is not None:
        return str(search.error)
    return "done" if search.hits is None else f"{search.hits} results"


def _mean_mark(record: Mapping[str, Any]) -> float | None:
    """Mean of the four marks, as a share of the full one; ``None`` unless each is a whole number in range."""
    marks = [mark for name in QUERY_DIMENSIONS if (mark := _mark(record.get(name))) is not None]
    return sum(marks) / (FULL_MARK * len(marks)) if len(marks) == len(QUERY_DIMENSIONS) else None


def _mark(value: Any) -> int | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= FULL_MARK:
        return None
    return int(value) if value == int(value) else None
