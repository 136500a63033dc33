"""What goes wrong in the field, tried through a real executor: tools against real servers on loopback."""

import asyncio
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools import BackendPolicy, ResultCache, ToolExecutor, offline_tools
from opensearch_lightning.tools.download import Downloader, is_public
from opensearch_lightning.tools.online.lens import SerperLens
from opensearch_lightning.tools.online.paddlex import PaddleXLayoutParsing
from opensearch_lightning.tools.online.page_readers import JinaReader
from opensearch_lightning.tools.online.sentence_summary import SentenceSummarizer
from opensearch_lightning.tools.online.serper import Serper
from opensearch_lightning.tools.online.web_search import WebSearch
from opensearch_lightning.tools.picture_tools import perspective_correct
from opensearch_lightning.types import INFRASTRUCTURE_ERRORS, ErrorKind
from tests.tools.fakes import KEY, FakeTool, book, call
from tests.tools.loopback import LoopbackServer
from tests.tools.online.servers import SERPER_KEY, InTurn, SerperServer
from tests.tools.online.test_paddlex import PaddleX

BOX = {"image": "img_1", "x": 1, "y": 2, "width": 3, "height": 4}


class Listener:
    """Accepts connections and says nothing; ``connections`` counts them."""

    def __init__(self, host="127.0.0.1"):
        self.host = host
        self.connections = 0

    async def __aenter__(self):
        self._release = asyncio.Event()
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"
        return self

    async def __aexit__(self, *_):
        self._release.set()
        self._server.close()

    async def _accept(self, reader, writer):
        self.connections += 1
        await self._release.wait()
        writer.close()


class Refusing(LoopbackServer):
    """Answers every request the same way; ``times`` are those of the requests."""

    client_max_size = 2**24

    def __init__(self, status, **headers):
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.times = []

    async def handle(self, request):
        self.times.append(time.monotonic())
        return web.Response(status=self.status, headers=self.headers)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", SERPER_KEY)


def web_search(url, **options):
    reader = JinaReader(api_key_env=None, base_url="http://127.0.0.1:1", resolve_names=False)
    return WebSearch(Serper(base_url=url, **options), reader, SentenceSummarizer())


def lens(url, **options):
    return SerperLens(base_url=url, resolve_names=False, **options)


def pictures():
    """A book with one picture that has a public address."""
    images = book()
    images.add(Image.new("RGB", (40, 30), "blue"), "https://pictures.example.org/1.png")
    return images


PAID = {
    "text_search": (web_search, {"q": "emblem"}),
    "image_search": (lens, {"url": "img_2"}),
    "layout_parsing": (PaddleXLayoutParsing, {"image": "img_1"}),
}
each_paid_tool = pytest.mark.parametrize("name", PAID)


@each_paid_tool
async def test_a_server_that_accepts_and_never_answers_holds_up_no_other(make, name):
    build, arguments = PAID[name]
    async with Listener() as server:
        executor = make(build(server.url, timeout_s=60), FakeTool(name="quick"), timeout_s=2.0)
        dead = asyncio.create_task(executor.execute(call(name, **arguments), pictures(), KEY))
        others = await asyncio.gather(*(executor.execute(call("quick"), book(), KEY) for _ in range(20)))
        assert not dead.done()
        assert {other.error for other in others} == {None}
        result = await asyncio.wait_for(dead, 20)
        assert (result.error, server.connections) == (ErrorKind.TIMEOUT, 1)
        assert result.text == f"Error: timeout. The tool {name} did not answer; try again or go on another way."
        assert executor.metrics().tools[name].errors == {ErrorKind.TIMEOUT: 1}


def in_three_seconds():
    return format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)


@each_paid_tool
@pytest.mark.parametrize(
    ("headers", "gaps"),
    [
        (dict, [0.05, 0.1]),
        (lambda: {"Retry_After": "1"}, [1.0, 1.0]),
        # a date has whole seconds, and is gone at the second retry
        (lambda: {"Retry_After": in_three_seconds()}, [0.9, 0.1]),
    ],
    ids=["back-off", "seconds", "date"],
)
async def test_too_many_requests_are_waited_for_and_then_an_error_of_the_infrastructure(make, name, headers, gaps):
    build, arguments = PAID[name]
    async with Refusing(429, **headers()) as server:
        tool = build(server.url, policy=BackendPolicy(retries=2, backoff_s=0.1, timeout_s=60))
        result = await make(tool, timeout_s=60).execute(call(name, **arguments), pictures(), KEY)
        assert result.error is ErrorKind.RATE_LIMITED
        assert result.error in INFRASTRUCTURE_ERRORS
        assert len(server.times) == 3
        waits = [later - start for start, later in zip(server.times, server.times[1:], strict=False)]
        assert all(wait >= 0.98 * least for wait, least in zip(waits, gaps, strict=True)), waits


@each_paid_tool
async def test_a_service_that_redirects_inward_is_not_followed(make, name):
    build, arguments = PAID[name]
    async with Listener("127.0.0.2") as secret, Refusing(307, Location=f"{secret.url}/secret") as server:
        result = await make(build(server.url), timeout_s=5).execute(call(name, **arguments), pictures(), KEY)
        assert (result.error, len(server.times), secret.connections) == (ErrorKind.BACKEND_ERROR, 1, 0)


FAULTS = {
    "busy": ErrorKind.RATE_LIMITED,
    "broken": ErrorKind.BACKEND_ERROR,
    "half": ErrorKind.BACKEND_ERROR,
    "html": ErrorKind.BACKEND_ERROR,
    "inward": ErrorKind.BACKEND_ERROR,
    "silent": ErrorKind.TIMEOUT,
}


def kept(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT count(*) FROM results").fetchone()[0]


async def test_no_failure_is_ever_kept(make, tmp_path):
    path = tmp_path / "cache.sqlite"
    async with SerperServer() as server:
        server.faults[None] = InTurn(FAULTS)
        executor = make(web_search(server.url, timeout_s=3.0), cache=ResultCache(path), timeout_s=60)
        for kind in FAULTS.values():
            result = await executor.execute(call("text_search", q="emblem"), book(), KEY)
            assert (result.error, result.cached, kept(path)) == (kind, False, 0)
        results = [await executor.execute(call("text_search", q="emblem"), book(), KEY) for _ in range(2)]
        assert [(result.error, result.hits, result.cached) for result in results] == [(None, 0, False), (None, 0, True)]
        assert (len(server.asked), kept(path)) == (len(FAULTS) + 1, 1)


async def test_one_picture_under_two_names_is_read_and_paid_for_once(make, tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
    images = book(noise, noise.copy(), Image.new("RGB", (30, 20), "blue"))
    noise.save(tmp_path / "again.png")
    images.add((tmp_path / "again.png").read_bytes())
    async with PaddleX() as server:
        executor = make(PaddleXLayoutParsing(server.url), cache=ResultCache(), timeout_s=60)
        results = [
            await executor.execute(call("layout_parsing", image=name), images, KEY)
            for name in ("img_1", "img_2", "img_4", "img_3")
        ]
        assert [result.cached for result in results] == [False, True, True, False]
        assert len(server.bodies) == 2


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to addresses of this machine."""
    table = {"inward.example": "127.0.0.2", "mapped.example": "::ffff:127.0.0.2"}

    def getaddrinfo(host, port, *_, **__):
        address = table.get(host, host)
        return [(10 if ":" in address else 2, 1, 6, "", (address, port, 0, 0) if ":" in address else (address, port))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)


INWARD = ["127.0.0.2", "[::ffff:127.0.0.2]", "inward.example", "mapped.example", "169.254.169.254"]


@pytest.fixture
async def connected(monkeypatch):
    """Addresses to which the running loop was told to connect."""
    loop = asyncio.get_running_loop()
    connect, targets = loop.sock_connect, []

    async def noting(sock, address):
        targets.append(address[0])
        return await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", noting)
    return targets


@pytest.mark.parametrize("host", INWARD)
async def test_no_connection_is_made_to_what_is_not_public(names, connected, host):
    async with Listener("127.0.0.2") as secret:
        downloader = Downloader(timeout_s=5)
        with pytest.raises(ToolError, match="not public") as caught:
            await downloader.get(f"http://{host}:{secret.port}/latest/meta-data")
        await downloader.aclose()
        assert (caught.value.kind, connected, secret.connections) == (ErrorKind.INVALID_ARGUMENT, [], 0)


@pytest.mark.parametrize("host", INWARD)
async def test_no_connection_is_made_where_a_page_redirects_inward(names, connected, host):
    async with Listener("127.0.0.2") as secret, Refusing(302, Location=f"http://{host}:{secret.port}/") as page:
        # the page itself stands for one of the internet
        downloader = Downloader(allowed=lambda at: str(at) == "127.0.0.1" or is_public(at), timeout_s=5)
        with pytest.raises(ToolError, match="not public") as caught:
            await downloader.get(page.url)
        await downloader.aclose()
        assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
        assert (connected, secret.connections, len(page.times)) == (["127.0.0.1"], 0, 1)


WORLD = SimpleNamespace(text_index=None, image_index=None)


async def test_no_file_or_address_is_reached_by_the_name_of_an_image(make, tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    Image.new("RGB", (30, 20)).save(path)
    opened = []
    monkeypatch.setattr("PIL.Image.open", lambda *given, **_: opened.append(given))
    monkeypatch.chdir(tmp_path)
    tools = [tool for tool in offline_tools(WORLD) if tool.name != "text_search"]
    executor = make(*tools)
    async with Listener() as server:
        for tool in tools:
            (argument,) = {"image", "url"} & set(tool.schema["function"]["parameters"]["properties"])
            box = {name: 5 for name in ("x", "y", "width", "height") if tool.name == "crop"}
            for name in (str(path), "picture.png", "./picture.png", path.as_uri(), f"{server.url}/picture.png"):
                result = await executor.execute(call(tool.name, **{argument: name}, **box), book(), KEY)
                assert (result.tool, result.error) == (tool.name, ErrorKind.UNKNOWN_IMAGE)
        assert (opened, server.connections) == ([], 0)
    assert executor.metrics().errors == 5 * len(tools)


@pytest.mark.parametrize("field", ["x", "y", "width", "height"])
async def test_boxes_that_are_none_are_counted_errors(make, field):
    executor = make(*offline_tools(WORLD, names=["crop"]))
    values = [float("nan"), float("inf"), -float("inf"), None, "10%", [1], True]
    if field in ("width", "height"):
        values += [0, -5]
    for value in values:
        result = await executor.execute(call("crop", **{**BOX, field: value}), book(), KEY)
        assert (result.error, result.image) == (ErrorKind.INVALID_ARGUMENT, None)
        assert field in result.text
    assert executor.metrics().tools["crop"].errors == {ErrorKind.INVALID_ARGUMENT: len(values)}


def test_thousandths_are_stated_in_the_schema():
    (tool,) = offline_tools(WORLD, names=["crop"], coordinates="relative_1000")
    function = ToolExecutor([tool]).schemas[0]["function"]
    assert "0 to 1000" in function["description"]
    properties = function["parameters"]["properties"]
    assert {properties[name]["maximum"] for name in ("x", "y", "width", "height")} == {1000}
    assert [properties[name].get("minimum") for name in ("x", "y")] == [0, 0]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_diamond_is_put_upright_in_grey_too(mode):
    pixels = np.zeros((140, 140), np.uint8)
    cv2.fillPoly(pixels, [np.array([(20, 70), (70, 20), (120, 70), (70, 120)])], 255)
    # dark towards the right: a mirror image would be dark on the other side
    cv2.fillPoly(pixels, [np.array([(105, 70), (95, 60), (85, 70), (95, 80)])], 128)
    output = perspective_correct(Image.fromarray(pixels).convert(mode))
    assert (output.text, output.note, output.image.mode) == ("Perspective corrected.", None, mode)
    assert all(68 <= side <= 80 for side in output.image.size)
    upright = np.asarray(output.image.convert("L").resize((72, 72)))
    # its right corner is the second of four, clockwise from the upper one
    assert upright[18, 54] < 200
    assert min(upright[18, 18], upright[54, 54], upright[54, 18]) > 200
