import json

import aiohttp
import pytest
from aiohttp import web

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import MissingKeyError, Secret
from opensearch_lightning.tools.online.service import Service

KEY = "ab/cd+ef-0123456789"


@pytest.fixture
async def serving():
    runners = []

    async def serve(handler):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("A_TEST_KEY", KEY)
    return Secret.from_environment("A_TEST_KEY")


async def test_a_key_that_is_sent_back_is_taken_out_however_it_is_written(serving, key):
    escaped = "".join(f"\\u{ord(character):04x}" for character in KEY)
    body = f'{{"a": ["{KEY}", "x{escaped}x", "{KEY.replace("/", chr(92) + "/")}"], "{KEY}": {{"b": 1}}}}'
    assert KEY in json.loads(body)["a"][1]

    async def echo(request):
        return web.Response(text=body, content_type="application/json")

    service = Service("probe", await serving(echo), key=key)
    answer = await service.request("GET", "/")
    await service.aclose()
    assert answer == {"a": ["***", "x***x", "***"], "***": {"b": 1}}


async def test_requests_go_through_the_proxy_of_the_environment(serving, key, monkeypatch):
    seen = []

    async def proxy(request):
        seen.append((request.method, str(request.url), request.headers["X-API-KEY"]))
        return web.json_response({"fine": True})

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", await serving(proxy))
    service = Service("probe", "http://service.example", key=key)
    answer = await service.request("POST", "/search", headers={"X-API-KEY": key.reveal()}, payload={"q": "x"})
    await service.aclose()
    assert answer == {"fine": True}
    assert seen == [("POST", "http://service.example/search", KEY)]


def test_secrets_are_in_no_repr_and_pickles_name_their_variable(key):
    import pickle

    assert KEY not in repr(key) + str(key) + f"{key}"
    packed = pickle.dumps(key)
    assert KEY.encode() not in packed
    assert pickle.loads(packed).reveal() == KEY


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("A_TEST_KEY", None, MissingKeyError, "A_TEST_KEY is not set: export A_TEST_KEY="),
        ("A_TEST_KEY", "  ", MissingKeyError, "A_TEST_KEY is not set"),
        ("A_TEST_KEY", "EMPTY", ConfigurationError, "less than 8 characters"),
        ("A_TEST_KEY", "0123456\x7f89", ConfigurationError, "characters that no key has"),
        ("sk-0123456789", None, ConfigurationError, "keys themselves never belong into a configuration"),
    ],
)
def test_keys_that_cannot_be_used(name, value, error, message, monkeypatch):
    monkeypatch.delenv("A_TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_TEST_KEY", value)
    with pytest.raises(error, match=message) as caught:
        Secret.from_environment(name)
    assert "sk-0123456789" not in str(caught.value)


def test_aiohttp_has_the_seam_that_downloads_are_checked_at():
    assert "socket_factory" in aiohttp.TCPConnector.__init__.__kwdefaults__
