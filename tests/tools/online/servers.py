"""Local servers that speak as Serper, Jina Reader and a chat API do, and answer 4xx to what those do not know.

Each of them also misbehaves on demand: ``server.faults`` says, for all requests (``None``) or by what they ask for,
what it does instead of answering: one of the names in :func:`_misbehave`, or anything else as JSON.
"""

import asyncio
import contextlib
import json
from urllib.parse import unquote

from aiohttp import web

from tests.tools.loopback import LoopbackServer

SERPER_KEY = "serper-key-4f1c9a"
JINA_KEY = "jina_key_77b2e0"
CHAT_KEY = "sk-chat-key-93ad51"
KEYS = (SERPER_KEY, JINA_KEY, CHAT_KEY)


def patience(fault):
    """Seconds to wait for a server with a fault: little where time must run out, much on a busy machine elsewhere."""
    return 1.0 if fault in ("silent", "drip") else 20.0


class InTurn(list):
    """Faults of one request after another; then there are none."""


class Server(LoopbackServer):
    """Listens on loopback; ``asked`` are the requests it understood, ``open`` those it has not yet answered."""

    path = "/{rest:.*}"

    client_max_size = 1024**2
    # A handler ends when its client goes away.
    handler_cancellation = True

    def __init__(self):
        self.asked = []
        self.faults = {}
        self.open = 0
        self.most_open = 0
        self.busy = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.refused = []

    async def all_closed(self):
        """Waits until no request is open."""
        async with asyncio.timeout(5):
            await self.idle.wait()

    @property
    def connections(self):
        """How many are open, used or not."""
        return len(self._runner.server.connections)

    async def all_gone(self):
        """Waits until no connection is open."""
        async with asyncio.timeout(5):
            while self.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def handle(self, request):
        self.open += 1
        self.busy.set()
        self.idle.clear()
        self.most_open = max(self.most_open, self.open)
        try:
            what, answer = await self._understand(request)
            fault = self.faults.get(what, self.faults.get(None))
            if isinstance(fault, InTurn):
                fault = fault.pop(0) if fault else None
            return await _misbehave(fault, request) if fault is not None else answer
        except web.HTTPException as error:
            self.refused.append(error.text)
            raise
        finally:
            self.open -= 1
            if not self.open:
                self.busy.clear()
                self.idle.set()

    async def _understand(self, request):
        raise NotImplementedError


async def _misbehave(fault, request):
    match fault:
        case "silent":
            await asyncio.sleep(60)
            return web.Response()
        case "drip":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for _ in range(600):
                await response.write(b" ")
                await asyncio.sleep(0.1)
            return response
        case "busy":
            return web.Response(status=429, headers={"Retry-After": "7"}, text="slow down")
        case "busy a moment":
            return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")
        case "away":
            return web.Response(status=503, headers={"Retry-After": "7"})
        case "broken":
            return web.json_response({"error": {"message": " ".join(KEYS)}}, status=500)
        case "refuses":
            return web.json_response({"error": {"message": f"Incorrect API key: {' '.join(KEYS)}"}}, status=401)
        case "half":
            response = web.StreamResponse(headers={"Content-Length": "5000", "Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(b'{"organic": [')
            request.transport.close()
            return response
        case "html":
            return web.Response(text="<html><h1>Log in</h1></html>", content_type="text/html")
        case "no json":
            return web.Response(text='{"organic": [', content_type="application/json")
        case "deep":
            return web.Response(text="[" * 200_000, content_type="application/json")
        case "huge":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    await response.write(b" " * 100_000)
            return response
        case "inward":
            return web.Response(status=307, headers={"Location": f"http://127.0.0.2:{request.url.port}/secret"})
        case _:
            return web.json_response(fault)


def _refuse(why, status=400):
    kinds = {400: web.HTTPBadRequest, 403: web.HTTPForbidden, 404: web.HTTPNotFound}
    raise kinds[status](text=why)


async def _json(request, fields):
    """The body, whose fields must be among ``fields`` (name: check)."""
    if request.content_type != "application/json":
        _refuse(f"content type {request.content_type}")
    try:
        body = json.loads(await request.text())
    except ValueError:
        _refuse("no JSON")
    if not isinstance(body, dict):
        _refuse("no object")
    for name, value in body.items():
        if name not in fields or not fields[name](value):
            _refuse(f"field {name}: {value!r}")
    return body


def _is_text(value):
    return isinstance(value, str) and bool(value)


def _is_count(most):
    return lambda value: type(value) is int and 1 <= value <= most


SERPER_FIELDS = {
    "q": _is_text,
    "gl": lambda value: _is_text(value) and len(value) == 2,
    "hl": lambda value: _is_text(value) and len(value) <= 8,
    "num": _is_count(100),
    "page": _is_count(100),
    "tbs": _is_text,
    "autocorrect": lambda value: isinstance(value, bool),
    "location": _is_text,
}


class SerperServer(Server):
    """``POST /search``; ``results`` are its organic ones."""

    def __init__(self, *results):
        super().__init__()
        self.results = list(results)

    async def _understand(self, request):
        if request.method != "POST" or request.path_qs != "/search":
            _refuse(f"{request.method} {request.path_qs}", 404)
        if request.headers.get("X-API-KEY") != SERPER_KEY:
            _refuse("Unauthorized.", 403)
        body = await _json(request, SERPER_FIELDS)
        if "q" not in body:
            _refuse("Missing query parameter")
        self.asked.append(body)
        # Real answers number the results from 1.
        organic = [
            {"position": i, **entry} if isinstance(entry, dict) else entry
            for i, entry in enumerate(self.results[: body.get("num", 10)], start=1)
        ]
        answer = {"searchParameters": {**body, "type": "search", "engine": "google"}, "organic": organic, "credits": 1}
        return body["q"], web.json_response(answer)


JINA_HEADERS = {"x-timeout", "x-respond-with", "x-no-cache", "x-locale", "x-engine", "x-retain-images"}


class JinaServer(Server):
    """``GET /<url>``; ``pages`` are texts, or whole ``data`` objects, by URL."""

    def __init__(self, *, key=JINA_KEY, pages=None):
        super().__init__()
        self.key = key
        self.pages = {"https://example.com": "Example Domain.", **(pages or {})}

    async def _understand(self, request):
        if request.method != "GET":
            _refuse(request.method, 404)
        if request.headers.get("Authorization") != (None if self.key is None else f"Bearer {self.key}"):
            _refuse("Authorization", 403)
        if request.headers.get("Accept") != "application/json":
            _refuse("Accept")
        if unknown := {name.lower() for name in request.headers if name.lower().startswith("x-")} - JINA_HEADERS:
            _refuse(f"headers {unknown}")
        seconds = request.headers.get("X-Timeout", "1")
        if not seconds.isdecimal() or not 1 <= int(seconds) <= 180:
            _refuse(f"X-Timeout {seconds}")
        # As the service does: path and query, decoded once.
        url = unquote(request.raw_path[1:])
        if not url.startswith(("http://", "https://")):
            _refuse(f"url {url}")
        self.asked.append(url)
        page = self.pages.get(url)
        if page is None:
            return url, web.json_response(
                {"data": None, "code": 422, "status": 42206, "message": "no page"}, status=422
            )
        data = page if isinstance(page, dict) else {"title": f"Title of {url}", "url": url, "content": page}
        data = {"description": "", "usage": {"tokens": 10}, **data}
        return url, web.json_response({"code": 200, "status": 20000, "data": data, "meta": {"usage": {"tokens": 10}}})


CHAT_FIELDS = {
    "model": _is_text,
    "messages": lambda value: (
        isinstance(value, list)
        and bool(value)
        and all(set(turn) == {"role", "content"} and _is_text(turn["content"]) for turn in value)
        and [turn["role"] for turn in value] == ["system", "user"]
    ),
    "max_tokens": _is_count(100_000),
    "max_completion_tokens": _is_count(100_000),
    "temperature": lambda value: isinstance(value, int | float) and 0 <= value <= 2,
    "stream": lambda value: value is False,
    "chat_template_kwargs": lambda value: isinstance(value, dict),
}


class ChatServer(Server):
    """``POST /v1/chat/completions``; ``answer(user message)`` is what the model writes."""

    def __init__(self, answer=lambda prompt: "A summary. It has two sentences.", *, key=CHAT_KEY, model="small"):
        super().__init__()
        self.answer = answer
        self.key = key
        self.model = model

    @property
    def base_url(self):
        return f"{self.url}/v1"

    async def _understand(self, request):
        if request.method != "POST" or request.path_qs != "/v1/chat/completions":
            _refuse(f"{request.method} {request.path_qs}", 404)
        if request.headers.get("Authorization") != (None if self.key is None else f"Bearer {self.key}"):
            _refuse("Authorization", 403)
        body = await _json(request, CHAT_FIELDS)
        if body.get("model") != self.model:
            _refuse(f"model {body.get('model')}", 404)
        prompt = body["messages"][1]["content"]
        self.asked.append(body)
        message = {"role": "assistant", "content": self.answer(prompt)}
        completion = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.model,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        return prompt, web.json_response(completion)


class PageServer(Server):
    """Any page as bytes with its ``Content-Type``, by path."""

    def __init__(self, **pages):
        super().__init__()
        self.pages = pages

    async def _understand(self, request):
        name = request.path[1:]
        self.asked.append(name)
        content_type, body = self.pages.get(name, ("text/html", b"<html><body>nothing</body></html>"))
        return name, web.Response(body=body, headers={"Content-Type": content_type} if content_type else {})
