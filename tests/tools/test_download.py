"""Downloads from servers that misbehave, and addresses that are never contacted; real servers on loopback."""

import asyncio
import ipaddress
import time
from datetime import UTC, datetime

import pytest
from aiohttp import web

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.download import Downloader, check_public, is_public, retry_after_s
from opensearch_lightning.types import ErrorKind
from tests.tools.loopback import LoopbackServer

HOME = ipaddress.ip_address("127.0.0.1")


class Server(LoopbackServer):
    """Answers by path; notes the paths that were asked for."""

    def __init__(self):
        self.asked = []

    async def handle(self, request):
        assert request.method == "GET"
        name = request.match_info["path"]
        self.asked.append(name)
        match name:
            case "page":
                return web.Response(text="hello", content_type="text/html", charset="utf-8")
            case "silent":
                await asyncio.sleep(30)
            case "drip":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(300):
                    await response.write(b"x")
                    await asyncio.sleep(0.1)
                return response
            case "busy":
                return web.Response(status=429, headers={"Retry-After": "7"})
            case "away":
                return web.Response(status=503, headers={"Retry-After": "2"})
            case "broken":
                return web.Response(status=500, text="a long story with a secret")
            case "half":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"x" * 10)
                request.transport.close()
                return response
            case "huge":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(1000):
                    await response.write(b"x" * 100_000)
                return response
            case "packed":
                return web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
            case "round":
                raise web.HTTPFound("/round")
            case "moved":
                raise web.HTTPFound("page")
            case "inward":
                raise web.HTTPFound(f"http://127.0.0.2:{self.port}/secret")
            case "file":
                raise web.HTTPFound("file:///etc/passwd")
        return web.Response(text="secret")


@pytest.fixture
async def server():
    async with Server() as started:
        yield started


@pytest.fixture
async def get():
    made = []

    async def fetch(url, allowed=lambda address: address == HOME, **options):
        made.append(Downloader(allowed=allowed, **options))
        return await made[-1].get(url)

    yield fetch
    for downloader in made:
        await downloader.aclose()


async def test_a_page_comes_with_its_type(server, get):
    page = await get(f"{server.url}/page")
    assert (page.body, page.content_type, page.url) == (b"hello", "text/html", f"{server.url}/page")


async def test_redirects_are_followed(server, get):
    page = await get(f"{server.url}/moved")
    assert (page.body, page.url) == (b"hello", f"{server.url}/page")


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("broken", ErrorKind.BACKEND_ERROR, "status 500"),
        ("half", ErrorKind.BACKEND_ERROR, "could not be fetched"),
        ("huge", ErrorKind.BACKEND_ERROR, "larger than 1000000 bytes"),
        ("packed", ErrorKind.BACKEND_ERROR, "comes packed"),
        ("round", ErrorKind.BACKEND_ERROR, "redirects more than 5 times"),
        ("silent", ErrorKind.TIMEOUT, "within 0.5 s"),
        ("drip", ErrorKind.TIMEOUT, "within 0.5 s"),
    ],
)
async def test_servers_that_misbehave(server, get, path, kind, message):
    started = time.perf_counter()
    with pytest.raises(ToolError, match=message) as caught:
        await get(f"{server.url}/{path}", timeout_s=0.5, max_bytes=1_000_000)
    assert caught.value.kind is kind
    assert "secret" not in caught.value.message
    assert time.perf_counter() - started < 2


async def test_a_server_that_is_not_there(get):
    with pytest.raises(ToolError) as caught:
        await get("http://127.0.0.1:1/")
    assert caught.value.kind is ErrorKind.UNREACHABLE


@pytest.mark.parametrize(("path", "seconds"), [("busy", 7.0), ("away", 2.0)])
async def test_too_many_requests_say_when_to_come_back(server, get, path, seconds):
    with pytest.raises(ToolError) as caught:
        await get(f"{server.url}/{path}")
    assert (caught.value.kind, caught.value.retry_after_s) == (ErrorKind.RATE_LIMITED, seconds)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost", "2130706433", "0177.0.0.1", "127.1", "0.0.0.0", "[::1]"],
)
async def test_this_machine_is_never_contacted(server, get, host):
    with pytest.raises(ToolError, match="not public|no URL") as caught:
        await get(f"http://{host}:{server.port}/page", allowed=is_public)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert server.asked == []


async def test_a_redirect_inward_is_not_followed(server, get):
    with pytest.raises(ToolError, match="not public"):
        await get(f"{server.url}/inward")
    assert server.asked == ["inward"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/",
        "http:///page",
        "page",
        "http://user:word@example.org/",
        "http://[::/",
    ],
)
async def test_what_is_no_web_page_is_refused(get, url):
    with pytest.raises(ToolError) as caught:
        await get(url)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


async def test_a_redirect_to_a_file_is_refused(server, get):
    with pytest.raises(ToolError) as caught:
        await get(f"{server.url}/file")
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("169.254.169.254", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("::ffff:169.254.169.254", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("fec0::1", False),
        ("5f00::1", False),
        ("168.63.129.16", False),
    ],
)
def test_public_addresses(address, public):
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.mark.parametrize(
    "header",
    [
        "Fri, 01 May 99999999999999999999 12:00:30 GMT",
        "Fri, 01 May 2026 12:00:30 +99999999999999999999",
        "soon",
        "",
        "1e3",
    ],
)
def test_a_retry_after_that_says_nothing(header):
    assert retry_after_s(header) is None


@pytest.mark.parametrize("url", ["http://x..y/", f"http://{'a' * 70}.example/", "http://[bad"])
async def test_hosts_that_are_none(url):
    downloader = Downloader(timeout_s=5)
    with pytest.raises(ToolError) as caught:
        await downloader.get(url)
    await downloader.aclose()
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("host", ["1.1.1.1.1", "256.256.256.256", "\u0663.0.0.1", "[v1.a]"])
async def test_hosts_that_could_be_read_as_addresses(host):
    with pytest.raises(ToolError) as caught:
        await check_public(f"http://{host}/", resolve=False)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


def test_retry_after_is_a_number_or_a_date():
    now = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
    assert retry_after_s("120", now=now) == 120.0
    assert retry_after_s("Fri, 01 May 2026 12:00:30 GMT", now=now) == 30.0
    assert retry_after_s("Fri, 01 May 2026 11:00:00 GMT", now=now) == 0.0
    assert retry_after_s("soon", now=now) is None
    assert retry_after_s(None) is None


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_bytes": 0}, {"max_redirects": -1}])
def test_limits_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} "):
        Downloader(**options)
