"""Servers on loopback that take exactly what the real ones take, or misbehave as real ones do."""

import asyncio
import hashlib
from contextlib import contextmanager

from aiohttp import web

from opensearch_lightning.tools.threads import LoopThread
from tests.tools.loopback import LoopbackServer

KEY = "k-0123456789abcdef-serper"
TOKEN = "t-0123456789abcdef-files"
RESULT = {
    "title": "Lighthouse of Velmora",
    "source": "Velmora Gazette",
    "link": "https://gazette.example.org/lighthouse",
    "imageUrl": "https://gazette.example.org/lighthouse.jpg",
    "thumbnailUrl": "https://thumbs.example.org/1",
}


class Server(LoopbackServer):
    """A server on loopback; ``mode`` is how it misbehaves, ``None`` for not at all."""

    def __init__(self):
        self.mode = None
        self.hold_s = 30.0
        self.arrived = asyncio.Event()

    async def handle(self, request):
        answer = await self.answer(request)
        self.arrived.set()
        match self.mode:
            case None:
                return answer
            case "silent":
                await asyncio.sleep(self.hold_s)
            case "slow":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(int(self.hold_s * 10)):
                    await response.write(b" ")
                    await asyncio.sleep(0.1)
                return response
            case "busy":
                return web.Response(status=429, headers={"Retry-After": "7"}, text=f"slow down, {KEY}")
            case "broken":
                return web.Response(status=500, text=f"a long story with {KEY}")
            case "broke":
                return web.json_response({"message": "Not enough credits", "statusCode": 400}, status=400)
            case "half":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"organic": [')
                request.transport.close()
                return response
            case "html":
                return web.Response(text="<html>sign in first</html>", content_type="text/html")
            case "moved":
                raise web.HTTPFound(f"{self.url}/elsewhere")
            case "huge":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(400):
                    await response.write(b" " * 100_000)
                return response
        raise AssertionError(self.mode)

    async def answer(self, request):
        raise NotImplementedError


@contextmanager
def in_background(server):
    """Run a server on an event loop of its own, for tests that use several themselves."""
    thread = LoopThread()
    try:
        yield asyncio.run(thread.run(server.__aenter__()))
        asyncio.run(thread.run(server.__aexit__()))
    finally:
        thread.stop()


class LensServer(Server):
    """Serper's Lens. ``searched`` are the bodies that it was sent, ``refused`` what was wrong with others."""

    def __init__(self):
        super().__init__()
        self.searched = []
        self.refused = []
        self.body = {"searchParameters": {"type": "lens"}, "organic": [RESULT], "credits": 3}

    async def answer(self, request):
        if (request.method, request.path) != ("POST", "/lens") or request.query_string:
            return self._refuse(404, f"{request.method} {request.path_qs}")
        if request.headers.get("X-API-KEY") != KEY:
            return self._refuse(403, "the key")
        if request.content_type != "application/json":
            return self._refuse(415, request.content_type)
        body = await request.json()
        if not isinstance(body, dict) or not set(body) <= {"url", "hl", "gl"} or "url" not in body:
            return self._refuse(400, f"fields {body}")
        if not all(isinstance(value, str) for value in body.values()) or not body["url"].startswith("http"):
            return self._refuse(400, f"values {body}")
        self.searched.append(body)
        return web.json_response(self.body(body) if callable(self.body) else self.body)

    def _refuse(self, status, reason):
        self.refused.append(reason)
        return web.json_response({"message": "refused"}, status=status)


class FileServer(Server):
    """Keeps files that are put to it with the token, named by their content, and shows them to anyone."""

    def __init__(self, token=TOKEN):
        super().__init__()
        self.token = token
        self.files = {}
        self.puts = []
        self.refused = []

    async def answer(self, request):
        name = request.path.removeprefix("/files/")
        if request.path == f"/files/{name}" and "/" not in name and not request.query_string:
            if request.method == "GET" and name in self.files:
                data, content_type = self.files[name]
                return web.Response(body=data, content_type=content_type)
            if request.method == "PUT":
                return await self._put(request, name)
        self.refused.append(f"{request.method} {request.path_qs}")
        return web.Response(status=404)

    async def _put(self, request, name):
        wanted = None if self.token is None else f"Bearer {self.token}"
        if request.headers.get("Authorization") != wanted:
            self.refused.append("the token")
            return web.Response(status=401)
        data = await request.read()
        ending = {"image/png": ".png", "image/jpeg": ".jpg"}.get(request.content_type)
        if name != f"{hashlib.sha256(data).hexdigest()}{ending}":
            self.refused.append(f"{name} as {request.content_type}")
            return web.Response(status=422)
        self.puts.append(name)
        self.files[name] = (data, request.content_type)
        return web.Response(status=201)
