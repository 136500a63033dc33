"""One question to a model judge: cache, one request for equal questions, further asks, counts, limit of failures."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from opensearch_lightning.errors import ConfigurationError, JudgeError, JudgeUnavailable, ToolError
from opensearch_lightning.rewards.chat_model import ChatModel, Completion, Content
from opensearch_lightning.rewards.failure_limit import FailureLimit
from opensearch_lightning.rewards.judge_metrics import JudgeFailure, JudgeMetrics, JudgeRecorder
from opensearch_lightning.rewards.parsing import unwrapped
from opensearch_lightning.rewards.prompts import JudgePrompt
from opensearch_lightning.tools.backends import is_count
from opensearch_lightning.tools.cache import ResultCache
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.single_flight import SingleFlight
from opensearch_lightning.tools.threads import in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Read = Callable[[str], T | None]
"""Reads a judgement from what a model wrote; ``None`` where there is none."""

_SHOWN_CHARS = 80


class _Failed(Exception):
    """A judgement that failed, and how."""

    def __init__(self, kind: JudgeFailure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ChatJudge:
    """Asks a model for judgements.

    A judgement that is known is not asked for again: the cache goes by model, prompt version, content and sampling
    settings, failures are never kept, and equal questions at the same time are one. An answer that is refused, cut or
    unreadable is asked for again. What fails in the end raises; when too much does, the run is to stop.

    Args:
        model: which is asked; several judges may share it.
        asks: how often at most a question is put until the answer can be read.
        cache: keeps answers; ``None`` keeps none. It does not know servers apart: a model's name stands for the model.
        failures: the share of failed judgements that is borne; by default a quarter of the last 64.

    Raises:
        ConfigurationError: ``asks`` below 1.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        asks: int = 3,
        cache: ResultCache | None = None,
        failures: FailureLimit | None = None,
    ) -> None:
        if not is_count(asks, 1):
            raise ConfigurationError(f"asks of a judge is {asks!r}: set a whole number, 1 or more.")
        self.model = model
        self._asks = asks
        self._cache = cache
        self._failures = failures or FailureLimit()
        self._recorder = JudgeRecorder(model.price)
        self._flights: SingleFlight[Any] = SingleFlight()
        self._told_of_usage = False

    @property
    def is_structured(self) -> bool:
        """Whether the server was told to answer with JSON alone."""
        return self.model.answer_format != "text"

    def named(self, prompt: JudgePrompt) -> str:
        """Who judges, for reports: model and prompt version."""
        return f"{self.model.name} ({prompt.version})"

    async def ask(self, prompt: JudgePrompt, content: Content, read: Read[T]) -> T:
        """A judgement on ``content``.

        Args:
            prompt: the instructions.
            content: the data.
            read: takes the model's whole text, or with the format ``"text"`` what is left without reasoning and code
                fence; a pure function of it.

        Raises:
            JudgeError: the model could not be reached, or not be read.
            JudgeUnavailable: and that too often.
        """
        self._recorder.asked()
        body = self.model.body(prompt, content)
        return await self.model.serve(self._look_up(prompt, body, read))

    def drain(self) -> JudgeMetrics:
        """What was done since this was last called."""
        return self._recorder.drain()

    async def aclose(self) -> None:
        """Close connections and the cache's file; a later question opens them again."""
        await self.model.aclose()
        if self._cache is not None:
            await in_thread(self._cache.close)

    async def _look_up(self, prompt: JudgePrompt, body: Mapping[str, Any], read: Read[T]) -> T:
        key = _key(prompt, body)
        kept = await self._cache.get(key) if self._cache is not None else None
        if kept is not None and (judgement := read(self._bare(kept.text))) is not None:
            self._recorder.reused()
            return judgement
        judgement, shared = await self._flights.join(key, lambda: self._judge(key, prompt, body, read))
        if shared:
            self._recorder.reused()
        return judgement

    async def _judge(self, key: str, prompt: JudgePrompt, body: Mapping[str, Any], read: Read[T]) -> T:
        started = time.monotonic()
        try:
            text, judgement = await self._until_readable(body, read)
        except _Failed as failure:
            self._recorder.ended(time.monotonic() - started, failure.kind)
            raise self._failure(prompt, failure) from None
        self._recorder.ended(time.monotonic() - started, None)
        self._failures.note(failed=False)
        if self._cache is not None:
            await self._cache.put(key, ToolOutput(text=text))
        return judgement

    async def _until_readable(self, body: Mapping[str, Any], read: Read[T]) -> tuple[str, T]:
        for _ in range(self._asks):
            try:
                completion = await self.model.complete(body, lambda tried: self._recorder.requested(retry=tried > 0))
            except ToolError as error:
                raise _Failed(JudgeFailure(error.kind), error.message) from None
            self._recorder.answered(completion.usage)
            self._complain_without_usage(completion)
            failure = _fault(completion)
            if failure is None and completion.text is not None:
                if (judgement := read(self._bare(completion.text))) is not None:
                    return completion.text, judgement
                failure = _Failed(JudgeFailure.UNREADABLE, f"it wrote {completion.text[:_SHOWN_CHARS]!r}")
            self._recorder.unreadable()
        assert failure is not None
        raise failure

    def _bare(self, text: str) -> str:
        return text if self.is_structured else unwrapped(text)

    def _failure(self, prompt: JudgePrompt, failure: _Failed) -> JudgeError | JudgeUnavailable:
        self._failures.note(failed=True)
        what = f"{failure.kind}: {str(failure).rstrip('.')}"
        crossed = self._failures.crossed()
        if crossed is None:
            return JudgeError(f"judge {self.named(prompt)} gave no judgement ({what})")
        failed, seen = crossed
        return JudgeUnavailable(
            f"judge {self.named(prompt)} failed on {failed} of its last {seen} judgements, more than max_failed="
            f"{self._failures.max_failed:g} allows; the last: {what}; check that {self.model.address} answers, the "
            f"model's name, its key and answer_format={self.model.answer_format}, then go on from the last checkpoint"
        )

    def _complain_without_usage(self, completion: Completion) -> None:
        if completion.usage is None and self.model.price is not None and not self._told_of_usage:
            self._told_of_usage = True
            logger.warning("%s does not tell its tokens: its cost is not counted", self.model.name)


def _key(prompt: JudgePrompt, body: Mapping[str, Any]) -> str:
    text = json.dumps(["judgement", prompt.version, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fault(completion: Completion) -> _Failed | None:
    """What keeps an answer from being read at all."""
    if completion.refused:
        return _Failed(JudgeFailure.REFUSED, "it refused to answer")
    if completion.finish == "length":
        return _Failed(JudgeFailure.CUT, "its answer was cut at the limit of tokens; raise max_tokens")
    if completion.finish not in ("stop", None):
        return _Failed(JudgeFailure.UNREADABLE, f"its answer ended with {completion.finish[:_SHOWN_CHARS]!r}")
    if completion.text is None or not completion.text.strip():
        return _Failed(JudgeFailure.UNREADABLE, "it wrote nothing")
    return None
