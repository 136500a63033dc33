"""A local server that speaks the chat API strictly, as far as judges use it, and misbehaves on demand."""

import asyncio
import json

from aiohttp import web

from tests.tools.online.servers import Server

JUDGE_KEY = "sk-judge-key-51c7e2"

_FIELDS = {
    "model": lambda value: isinstance(value, str),
    "messages": lambda value: [turn["role"] for turn in value] == ["system", "user"],
    "temperature": lambda value: isinstance(value, int | float) and 0 <= value <= 2,
    "max_tokens": lambda value: type(value) is int and value > 0,
    "max_completion_tokens": lambda value: type(value) is int and value > 0,
    "response_format": lambda value: _is_format(value),
}


def _is_format(value):
    if value == {"type": "json_object"}:
        return True
    named = value["json_schema"]
    return value["type"] == "json_schema" and set(named) == {"name", "strict", "schema"} and named["strict"] is True


class JudgeServer(Server):
    """``POST /v1/chat/completions``.

    ``answer`` is what the model writes: a text, a dict for the JSON that it is, a whole ``choice`` (a dict with
    ``message``), or a function of the data in the user turn that returns one of these.
    """

    def __init__(self, answer, *, usage=(100, 20)):
        super().__init__()
        self.answer = answer
        self.usage = usage
        self.answers_after_s = 0.0

    @property
    def base_url(self):
        return f"{self.url}/v1"

    def data(self, number=-1):
        """The record that was judged in one of the requests."""
        return _record(self.asked[number])

    async def _understand(self, request):
        if request.method != "POST" or request.path_qs != "/v1/chat/completions":
            raise web.HTTPNotFound(text=f"{request.method} {request.path_qs}")
        if request.headers.get("Authorization") != f"Bearer {JUDGE_KEY}":
            raise web.HTTPForbidden(text="Authorization")
        body = await request.json()
        wrong = [name for name, value in body.items() if name not in _FIELDS or not _FIELDS[name](value)]
        if wrong:
            raise web.HTTPBadRequest(text=f"fields {wrong}")
        self.asked.append(body)
        await asyncio.sleep(self.answers_after_s)
        answer = self.answer(_record(body)) if callable(self.answer) else self.answer
        if isinstance(answer, dict) and "message" in answer:
            choice = answer
        else:
            content = json.dumps(answer) if isinstance(answer, dict) else answer
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        completion = {"object": "chat.completion", "model": body["model"], "choices": [choice]}
        if self.usage is not None:
            completion["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), self.usage, strict=True))
        return None, web.json_response(completion)


def _record(body):
    content = body["messages"][1]["content"]
    return json.loads(content if isinstance(content, str) else content[0]["text"])
