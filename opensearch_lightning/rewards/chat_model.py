"""A language model behind the OpenAI chat API, as judges ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.rewards.judge_metrics import TokenPrice, Usage
from opensearch_lightning.rewards.prompts import JudgePrompt
from opensearch_lightning.tools.backends import Backend, BackendPolicy
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.tools.threads import LoopThread, in_thread
from opensearch_lightning.types import ErrorKind

if TYPE_CHECKING:
    from opensearch_lightning.tools.online.service import Service

T = TypeVar("T")
AnswerFormat = Literal["json_schema", "json_object", "text"]
Content = str | Sequence[Mapping[str, Any]]
"""A user turn: its text, or its parts as the chat API takes them."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What came back: the text, ``None`` where there is none, why it ended, and the server's count of tokens."""

    text: str | None
    finish: str | None
    refused: bool
    usage: Usage | None


class ChatModel:
    """One model on one server; for any event loop and thread.

    Requests run on a loop in a thread of their own, which starts with the first one and ends with :meth:`aclose`;
    judges may share a model, and with it its limits. Redirects are not followed, and no error repeats what a server
    said.

    Args:
        name: under which the server offers it.
        base_url: of the API.
        api_key_env: environment variable that holds the key; ``None`` for servers without one.
        policy: rate, requests at once, retries and breaker. Its ``timeout_s`` is for a request and its retries; by
            default as long as all of them may take.
        timeout_s: seconds of a single try.
        temperature: of sampling; ``None`` sends none, for models that take no other than their own.
        max_tokens: most tokens of an answer; ``None`` sends none.
        answer_format: how the server is told to answer: ``"json_schema"`` (structured output), ``"json_object"`` for
            servers without schemas, ``"text"`` for servers without either. Only with ``"text"`` may reasoning or a code
            fence stand around the answer.
        extra_body: further fields of the request, such as ``{"max_completion_tokens": 4096}``.
        price: of its tokens; ``None`` counts no cost.

    Raises:
        MissingKeyError: the variable is not set.
        ConfigurationError: no name, or a URL, a limit or a variable's name that cannot be.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key_env: str | None = "OPENAI_API_KEY",
        policy: BackendPolicy | None = None,
        timeout_s: float = 60.0,
        temperature: float | None = 0.0,
        max_tokens: int | None = 1024,
        answer_format: AnswerFormat = "json_schema",
        extra_body: Mapping[str, Any] | None = None,
        price: TokenPrice | None = None,
    ) -> None:
        if not name:
            raise ConfigurationError("The name of a judge's model is empty: set that under which the server offers it.")
        if answer_format not in get_args(AnswerFormat):
            formats = ", ".join(get_args(AnswerFormat))
            raise ConfigurationError(f"answer_format of {name} is {answer_format!r}: set one of {formats}.")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigurationError(f"max_tokens of {name} is {max_tokens}: set 1 or more, or null to send none.")
        self.name = name
        self.address = base_url
        self.answer_format = answer_format
        self.price = price
        self._key = None if api_key_env is None else Secret.from_environment(api_key_env)
        self._policy = policy or BackendPolicy(retries=4, backoff_s=1.0, max_concurrency=64)
        self._timeout_s = timeout_s
        sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._fields: dict[str, Any] = {field: value for field, value in sampling.items() if value is not None}
        self._fields |= {**(extra_body or {}), "model": name}
        self._service = _service(name, base_url, self._key, timeout_s)
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._backend: Backend | None = None

    def body(self, prompt: JudgePrompt, content: Content) -> dict[str, Any]:
        """The request for ``prompt`` on ``content``."""
        body: dict[str, Any] = {
            **self._fields,
            "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": content}],
        }
        if self.answer_format == "json_schema":
            named = {"name": prompt.version.partition("/")[0], "strict": True, "schema": prompt.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif self.answer_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body

    async def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the model's own loop; cancelling the wait cancels the work."""
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread()
                total_s = self._timeout_s * (self._policy.retries + 1)
                self._backend = Backend(self._policy, timeout_s=total_s)
            thread = self._thread
        return await thread.run(work)

    async def complete(self, body: Mapping[str, Any], on_try: Callable[[int], None]) -> Completion:
        """Send a request, again where that may help; inside :meth:`serve` only.

        Args:
            body: as :meth:`body` makes it.
            on_try: is told the number of each try, from 0, before it is made.

        Raises:
            ToolError: of the kind of what went wrong on the last try.
        """
        assert self._backend is not None, "complete() runs inside serve()"
        tries = 0

        async def attempt(left_s: float) -> Completion:
            nonlocal tries
            on_try(tries)
            tries += 1
            return await self._send(body, left_s)

        return await self._backend.call(attempt)

    async def aclose(self) -> None:
        """Cancel what runs and close the connections; a later request opens new ones."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            await in_thread(partial(thread.stop, [self._service.aclose]))

    async def _send(self, body: Mapping[str, Any], left_s: float) -> Completion:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key.reveal()}"}
        try:
            async with asyncio.timeout(left_s):
                answer = await self._service.request("POST", "/chat/completions", headers=headers, payload=body)
        except TimeoutError:
            raise ToolError(ErrorKind.TIMEOUT, f"{self.name} did not answer in time.") from None
        return _completion(answer, self.name)


def _service(name: str, address: str, key: Secret | None, timeout_s: float) -> Service:
    try:
        # Late: a run without model judges needs no HTTP client.
        from opensearch_lightning.tools.online.service import Service
    except ImportError as error:
        raise ConfigurationError(
            f"Judging by {name} needs {error.name}: pip install 'opensearch-lightning[online]'."
        ) from error
    return Service(name, address, key=key, timeout_s=timeout_s, max_bytes=1_000_000)


def _completion(answer: Any, name: str) -> Completion:
    """The first choice of an answer.

    Raises:
        ToolError: ``backend_error`` for an answer that is no completion.
    """
    try:
        choice = answer["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError):
        raise ToolError(ErrorKind.BACKEND_ERROR, f"{name} answered something that is no completion.") from None
    return Completion(
        text=content if isinstance(content, str) else None,
        finish=finish if isinstance(finish, str) else None,
        refused=bool(refusal) or finish == "content_filter",
        usage=_usage(answer.get("usage")),
    )


def _usage(told: Any) -> Usage | None:
    if not isinstance(told, dict):
        return None
    given, written = told.get("prompt_tokens"), told.get("completion_tokens")
    if not isinstance(given, int) or not isinstance(written, int) or min(given, written) < 0:
        return None
    return Usage(input_tokens=given, output_tokens=written)
