"""Accuracy by a language model (Eq. 9, ``r_acc``; GPT-4o in the paper)."""

from __future__ import annotations

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rewards.chat_judge import ChatJudge
from opensearch_lightning.rewards.judge_metrics import JudgeMetrics
from opensearch_lightning.rewards.parsing import parse_object, parse_verdict
from opensearch_lightning.rewards.prompts import ACCURACY
from opensearch_lightning.rewards.quoting import cut, quoted
from opensearch_lightning.types import Task


class ChatAccuracyJudge:
    """Lets a model compare the final response with the reference answer and its aliases. It sees no images.

    Args:
        chat: asks the model.
        max_response_chars: the rest of a longer response is not shown to the model.

    Raises:
        ConfigurationError: a limit below 1.
    """

    def __init__(self, chat: ChatJudge, *, max_response_chars: int = 4_000) -> None:
        if max_response_chars < 1:
            raise ConfigurationError(f"max_response_chars is {max_response_chars}: set 1 or more.")
        self.chat = chat
        self.name = chat.named(ACCURACY)
        self._max_response_chars = max_response_chars

    async def judge(self, question: str, response: str, reference: Task) -> bool:
        """Whether ``response`` means what ``reference`` says.

        Raises:
            JudgeError: the model could not be reached or read.
            JudgeUnavailable: and that too often.
        """
        record = {
            "question": question,
            "reference": reference.answer,
            "also_right": list(reference.aliases),
            "response": cut(response, self._max_response_chars),
        }
        return await self.chat.ask(ACCURACY, quoted(record), self._read)

    def drain(self) -> JudgeMetrics:
        """What was done and spent since this was last called."""
        return self.chat.drain()

    async def aclose(self) -> None:
        """Close connections and the cache's file; a later call opens them again."""
        await self.chat.aclose()

    def _read(self, text: str) -> bool | None:
        if not self.chat.is_structured:
            return parse_verdict(text)
        verdict = (parse_object(text) or {}).get("correct")
        return verdict if isinstance(verdict, bool) else None
