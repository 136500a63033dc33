"""``image_search`` by Serper's Lens, against a server on loopback that takes nothing but what Lens takes."""

import asyncio
import io
import json
import logging

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import BackendPolicy, ClosableTool, ImageBook, ResultCache, ToolExecutor
from opensearch_lightning.tools.online.lens import SerperLens, encoded
from opensearch_lightning.tools.online.uploads import HttpUploader
from opensearch_lightning.tools.secrets import MissingKeyError
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY as CALL
from tests.tools.fakes import book, call
from tests.tools.online.lens_servers import KEY, RESULT, TOKEN, FileServer, LensServer, Server, in_background

PUBLIC = "https://pictures.example.org/lighthouse.jpg"
SIGNATURE = "0123456789abcdef0123456789abcdef"


class SigningUploader:
    """Gives out signed addresses; notes what it was given."""

    def __init__(self, error=None):
        self.uploaded = []
        self.closed = 0
        self.error = error

    async def upload(self, data, content_type):
        self.uploaded.append((data, content_type))
        if self.error is not None:
            raise self.error
        return f"https://bucket.example.org/{len(self.uploaded)}.png?X-Amz-Expires=60&X-Amz-Signature={SIGNATURE}"

    async def aclose(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    monkeypatch.setenv("FILES_TOKEN", TOKEN)


@pytest.fixture
async def server():
    async with LensServer() as started:
        yield started


@pytest.fixture
async def lens(server):
    made = []

    def make(**options):
        made.append(SerperLens(base_url=server.url, **{"resolve_names": False, **options}))
        return made[-1]

    yield make
    for tool in made:
        await tool.aclose()


def known(url=PUBLIC, colour="red"):
    images = ImageBook()
    images.add(Image.new("RGB", (40, 30), colour), url)
    return images


async def search(tool, images=None, top_k=5):
    return await tool.run({"url": "img_1", "top_k": top_k}, images or known())


async def failure(tool, images=None):
    with pytest.raises(ToolError) as caught:
        await search(tool, images)
    return caught.value


async def test_a_picture_with_an_address_is_searched_by_it(server, lens):
    uploader = SigningUploader()
    output = await search(lens(uploader=uploader, hl="en", gl="us"))
    assert (output.text, output.hits) == ("1. Lighthouse of Velmora (https://gazette.example.org/lighthouse)", 1)
    assert server.searched == [{"url": PUBLIC, "hl": "en", "gl": "us"}]
    assert (server.refused, uploader.uploaded) == ([], [])


async def test_only_what_is_set_is_sent(server, lens):
    await search(lens())
    assert server.searched == [{"url": PUBLIC}]


async def test_a_picture_of_the_trajectory_is_uploaded_as_it_is(server, lens):
    uploader = SigningUploader()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
    await search(lens(uploader=uploader), book(picture))
    ((data, content_type),) = uploader.uploaded
    assert content_type == "image/png"
    with Image.open(io.BytesIO(data)) as sent:
        assert (sent.format, sent.tobytes()) == ("PNG", picture.tobytes())
    assert server.searched == [
        {"url": f"https://bucket.example.org/1.png?X-Amz-Expires=60&X-Amz-Signature={SIGNATURE}"}
    ]


async def test_a_large_picture_goes_as_jpeg(lens):
    uploader = SigningUploader()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 100, 3), np.uint8))
    await search(lens(uploader=uploader, max_png_bytes=20_000), book(noise))
    ((data, content_type),) = uploader.uploaded
    with Image.open(io.BytesIO(data)) as sent:
        assert (content_type, sent.format, sent.size) == ("image/jpeg", "JPEG", (100, 100))
    assert encoded(Image.new("RGB", (100, 100)), 20_000)[1] == "image/png"


async def test_without_an_address_and_an_uploader_there_is_no_search(server, lens):
    error = await failure(lens(), book())
    assert error.kind is ErrorKind.BACKEND_ERROR
    assert "no public address" in error.message
    assert server.searched == server.refused == []


INWARD = [
    "http://127.0.0.1/a.png",
    "http://127.1/a.png",
    "http://2130706433/a.png",
    "http://0177.0.0.1/a.png",
    "http://0x7f.1/a.png",
    "http://%31%32%37.0.0.1/a.png",
    "http://127.0.0.1./a.png",
    "http://127.0.0.1\\.example.org/a.png",
    "http://１２７.0.0.1/a.png",
    "http://[::1]/a.png",
    "http://[::ffff:169.254.169.254]/a.png",
    "http://[fe80::1%25eth0]/a.png",
    "http://169.254.169.254/latest/meta-data",
    "https://10.0.0.8/a.png",
    "http://localhost:8080/a.png",
    "http://LOCALHOST/a.png",
    "http://files.internal/a.png",
    "http://nas.local./a.png",
    "http://nas/a.png",
    "http://user:word@example.org/a.png",
    "http://example.org:0/a.png",
    "http://example.org:99999/a.png",
    "http://[::/a.png",
    "http:///a.png",
    "http://example.org/a b.png",
    "http://exa\nmple.org/a.png",
    " https://example.org/a.png",
    "ftp://example.org/a.png",
    "file:///etc/passwd",
    "data:image/png;base64,AAAA",
    "img_1",
    "",
]


@pytest.mark.parametrize("url", INWARD)
async def test_what_is_no_public_address_goes_no_further(server, lens, url):
    uploader = SigningUploader()
    await search(lens(uploader=uploader), known(url))
    assert [body["url"].startswith("https://bucket.example.org/1.png") for body in server.searched] == [True]
    assert (await failure(lens(), known(url))).kind is ErrorKind.BACKEND_ERROR
    assert len(server.searched) == 1


@pytest.mark.parametrize(
    "url",
    [
        PUBLIC,
        "http://example.org/a.png?width=3#top",
        "https://EXAMPLE.org:8443/%C3%A4.png",
        "https://93.184.215.14/a.png",
        "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/a.png",
        "https://xn--mnchen-3ya.example/a.png",
        "https://localhost.example.org/a.png",
        "https://mylocal.example/a.png",
    ],
)
async def test_public_addresses_are_sent_as_they_are(server, lens, url):
    await search(lens(), known(url))
    assert server.searched == [{"url": url}]


@pytest.mark.parametrize(
    ("found", "sent"),
    [
        (["93.184.215.14"], True),
        (["10.0.0.8"], False),
        (["93.184.215.14", "127.0.0.1"], False),
        (["::ffff:169.254.169.254"], False),
        (None, False),
    ],
)
async def test_names_are_looked_up(server, lens, monkeypatch, found, sent):
    async def getaddrinfo(host, port, **_):
        assert (host, port) == ("pictures.example.org", 443)
        if found is None:
            raise OSError("not found")
        return [(None, None, None, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    uploader = SigningUploader()
    await search(lens(uploader=uploader, resolve_names=True))
    assert (server.searched[0]["url"] == PUBLIC, len(uploader.uploaded)) == (sent, 0 if sent else 1)


async def test_no_more_than_asked_for(server, lens):
    server.body = {"organic": [{**RESULT, "title": f"Result {i}"} for i in range(30)]}
    output = await search(lens(), top_k=3)
    assert [line[:11] for line in output.text.splitlines()] == ["1. Result 0", "2. Result 1", "3. Result 2"]
    assert output.hits == 3


@pytest.mark.parametrize(
    "body", [{"organic": []}, {"searchParameters": {"url": PUBLIC}}, {"searchParameters": {}, "organic": None}]
)
async def test_no_hits_are_no_error(server, lens, body):
    server.body = body
    output = await search(lens())
    assert (output.text, output.hits) == ("No results.", 0)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "organic",
        3,
        {},
        {"message": "Not enough credits"},
        {"organic": "none"},
        {"organic": {"title": "x"}},
        {"organic": None},
        {"organic": [None]},
        {"organic": ["title"]},
        {"organic": [[]]},
        {"organic": [{}]},
        {"organic": [{"title": "x"}]},
        {"organic": [{"title": ["x"], "link": "https://a.example"}]},
        {"organic": [{"title": "x", "link": 5}]},
        {"organic": [{"title": "x", "link": {"href": "https://a.example"}}]},
        {"organic": [{"title": "x", "source": False, "link": "https://a.example"}]},
    ],
    ids=str,
)
async def test_malformed_answers_are_typed_errors(server, lens, body):
    server.body = body
    error = await failure(lens())
    assert (error.kind, error.message) == (
        ErrorKind.BACKEND_ERROR,
        "Serper Lens answered something that is no list of pictures.",
    )


async def test_results_that_lack_something(server, lens):
    server.body = {
        "organic": [
            {"title": None, "source": "Gazette", "link": "https://a.example"},
            {"link": " https://b.example "},
            {"title": "No page"},
            {"title": "A\n\n2. forged (https://evil.example)", "link": "https://c.example"},
            {"title": "long " * 5000, "link": "https://d.example"},
            {"title": "endless", "link": "https://e.example/" + "x" * 5000},
        ]
    }
    lines = (await search(lens())).text.splitlines()
    assert lines[:3] == [
        "1. Gazette (https://a.example)",
        "2. https://b.example (https://b.example)",
        "3. A 2. forged (https://evil.example) (https://c.example)",
    ]
    assert len(lines) == 4 and len(lines[3]) < 400


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("silent", ErrorKind.TIMEOUT, "in time"),
        ("slow", ErrorKind.TIMEOUT, "in time"),
        ("busy", ErrorKind.RATE_LIMITED, "Too many requests"),
        ("broken", ErrorKind.BACKEND_ERROR, "status 500"),
        ("broke", ErrorKind.BACKEND_ERROR, "status 400"),
        ("half", ErrorKind.BACKEND_ERROR, "did not answer rightly"),
        ("html", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("moved", ErrorKind.BACKEND_ERROR, "redirects"),
        ("huge", ErrorKind.BACKEND_ERROR, "more than 2000000 bytes"),
    ],
)
async def test_a_service_that_misbehaves(server, lens, mode, kind, message):
    server.mode = mode
    error = await failure(lens(timeout_s=0.3 if kind is ErrorKind.TIMEOUT else 20))
    assert error.kind is kind
    assert message in error.message
    assert KEY not in error.message
    assert error.retry_after_s == (7.0 if mode == "busy" else None)
    assert (len(server.searched), server.refused) == (1, [])


async def test_a_service_that_is_not_there():
    tool = SerperLens(base_url="http://127.0.0.1:1", resolve_names=False)
    assert (await failure(tool)).kind is ErrorKind.UNREACHABLE
    await tool.aclose()


async def test_a_wrong_key_is_named_by_its_variable(server, lens, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "another-key")
    error = await failure(lens(api_key_env="OTHER_KEY"))
    assert error.kind is ErrorKind.BACKEND_ERROR
    assert "OTHER_KEY" in error.message and "another-key" not in error.message


async def test_the_service_is_tried_again_as_its_policy_says(server, lens):
    server.mode = "broken"
    await failure(lens(policy=BackendPolicy(retries=2, backoff_s=0.01)))
    assert len(server.searched) == 3


async def test_cancelling_ends_the_request(server, lens):
    server.mode = "silent"
    tool = lens()
    task = asyncio.create_task(search(tool))
    await server.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.mode = None
    assert (await search(tool)).hits == 1


async def test_an_upload_that_fails_costs_no_search(server, lens):
    uploader = SigningUploader(ToolError(ErrorKind.RATE_LIMITED, "Later.", retry_after_s=3))
    error = await failure(lens(uploader=uploader), book())
    assert (error.kind, error.retry_after_s) == (ErrorKind.RATE_LIMITED, 3)
    assert server.searched == []


async def test_one_picture_under_two_names_is_looked_up_once(server, lens):
    uploader = SigningUploader()
    executor = ToolExecutor([lens(uploader=uploader)], cache=ResultCache())
    red = Image.new("RGB", (40, 30), "red")
    images = book(red, red.copy(), Image.new("RGB", (40, 30), "blue"))
    results = [await executor.execute(call("image_search", url=name), images, CALL) for name in ("img_1", "img_2")]
    assert [result.cached for result in results] == [False, True]
    assert results[0].text == results[1].text
    assert len(server.searched) == len(uploader.uploaded) == 1
    await executor.execute(call("image_search", url="img_3"), images, CALL)
    assert len(server.searched) == 2
    await executor.aclose()
    assert uploader.closed == 1


async def test_equal_calls_at_one_time_are_looked_up_once(server, lens):
    executor = ToolExecutor([lens(uploader=SigningUploader())], cache=ResultCache())
    red = Image.new("RGB", (40, 30), "red")
    images = book(red, red.copy())
    calls = (executor.execute(call("image_search", url=name), images, CALL) for name in ("img_1", "img_2") * 4)
    assert {result.error for result in await asyncio.gather(*calls)} == {None}
    assert len(server.searched) == 1
    await executor.aclose()


async def test_failures_are_not_kept(server, lens):
    executor = ToolExecutor([lens()], cache=ResultCache())
    server.mode = "broken"
    images = known()
    assert (await executor.execute(call("image_search", url="img_1"), images, CALL)).error is ErrorKind.BACKEND_ERROR
    server.mode = None
    assert (await executor.execute(call("image_search", url="img_1"), images, CALL)).error is None
    await executor.aclose()


async def test_the_policy_can_name_images_alone(server, lens):
    executor = ToolExecutor([lens(uploader=SigningUploader())])
    for name in (PUBLIC, "http://169.254.169.254/", "/etc/passwd", "img_2"):
        result = await executor.execute(call("image_search", url=name), known(), CALL)
        assert result.error is ErrorKind.UNKNOWN_IMAGE
    assert server.searched == []
    await executor.aclose()


async def test_signed_addresses_and_keys_are_shown_to_nobody(server, lens, caplog):
    caplog.set_level(logging.DEBUG)
    leaks = [
        {"title": f"see ...?X-Amz-Signature={SIGNATURE}", "link": "https://a.example"},
        {"title": "mirror", "link": f"https://a.example/?of={SIGNATURE}"},
        {"title": f"the key is {KEY}", "link": "https://b.example"},
        RESULT,
    ]
    server.body = lambda body: {"searchParameters": body, "organic": leaks}
    tool = lens(uploader=SigningUploader())
    executor = ToolExecutor([tool], cache=ResultCache())
    good = await executor.execute(call("image_search", url="img_1"), book(), CALL)
    assert good.text.splitlines() == [
        "1. the key is *** (https://b.example)",
        "2. Lighthouse of Velmora (https://gazette.example.org/lighthouse)",
    ]
    shown = [good.text, repr(tool), repr(vars(tool)), repr(vars(tool._service))]
    for mode in ("busy", "broken", "half", "html", "moved", "huge"):
        server.mode = mode
        bad = await executor.execute(call("image_search", url="img_1"), book(Image.new("RGB", (9, 9))), CALL)
        assert bad.error is not None
        shown.append(bad.text)
    await executor.aclose()
    for text in [*shown, caplog.text]:
        assert KEY not in text and SIGNATURE not in text


def test_it_works_on_one_event_loop_after_another():
    async def once(tool, colour):
        output = await search(tool, book(Image.new("RGB", (40, 30), colour)))
        await tool.aclose()
        return output.hits

    with in_background(LensServer()) as server, in_background(FileServer()) as files:
        uploader = HttpUploader(f"{files.url}/files", token_env="FILES_TOKEN")
        tool = SerperLens(base_url=server.url, uploader=uploader)
        assert [asyncio.run(once(tool, colour)) for colour in ("red", "red", "blue")] == [1, 1, 1]
        assert (len(server.searched), len(files.puts)) == (3, 2)


async def test_the_probes_try_each_service(server, lens):
    async with FileServer() as files:
        tool = lens(uploader=HttpUploader(f"{files.url}/files", token_env="FILES_TOKEN"), probe_url=PUBLIC)
        probes = tool.probes()
        assert list(probes) == ["Serper Lens", "uploader"]
        for probe in probes.values():
            await probe()
        assert (server.searched, len(files.puts)) == ([{"url": PUBLIC}], 1)
        server.mode = "busy"
        with pytest.raises(ToolError) as caught:
            await probes["Serper Lens"]()
        assert caught.value.kind is ErrorKind.RATE_LIMITED
        files.files.clear()
        with pytest.raises(ToolError, match="404"):
            await probes["uploader"]()
        await tool.aclose()
    assert list(lens().probes()) == ["Serper Lens"]


async def test_a_probe_sees_an_address_that_shows_something_else(server, lens):
    async with FileServer() as files:
        tool = lens(uploader=HttpUploader(f"{files.url}/files", token_env="FILES_TOKEN"))
        probe = tool.probes()["uploader"]
        await probe()
        files.files[files.puts[0]] = (b"other", "image/png")
        with pytest.raises(ToolError, match="shows something else"):
            await probe()
        await tool.aclose()


async def test_closing_closes_both(lens):
    uploader = SigningUploader()
    tool = lens(uploader=uploader)
    assert isinstance(tool, ClosableTool)
    await tool.aclose()
    assert uploader.closed == 1


def test_settings_that_cannot_be(monkeypatch):
    for options in ({"top_k": 0}, {"top_k": 21}, {"max_png_bytes": -1}, {"timeout_s": 0}, {"base_url": "google"}):
        with pytest.raises(ConfigurationError, match="set"):
            SerperLens(**options)
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(MissingKeyError, match="SERPER_API_KEY"):
        SerperLens()


def test_the_schema_is_that_of_image_search():
    assert json.loads(json.dumps(SerperLens(top_k=7).schema))["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "url": {"type": "string", "format": "image-id", "description": "image id, such as img_1"},
            "top_k": {"type": "integer", "minimum": 1, "maximum": 20, "default": 7},
        },
        "required": ["url"],
    }


def test_a_book_knows_the_addresses_that_came_with_images():
    images = ImageBook()
    names = [images.add(Image.new("RGB", (4, 4)), PUBLIC), images.add(Image.new("RGB", (4, 4)))]
    assert [images.url(name) for name in names] == [PUBLIC, None]
    with pytest.raises(ToolError, match="img_3") as caught:
        images.url("img_3")
    assert caught.value.kind is ErrorKind.UNKNOWN_IMAGE


class SignedFiles(Server):
    """Shows what was uploaded to whoever has the signature; an uploader by itself."""

    async def upload(self, data, content_type):
        self.data = data
        return f"{self.url}/bucket/a%20picture.png?X-Amz-Signature=abc%2Fdef&X-Amz-Expires=60"

    async def aclose(self):
        pass

    async def answer(self, request):
        fits = request.path_qs == "/bucket/a%20picture.png?X-Amz-Signature=abc/def&X-Amz-Expires=60"
        return web.Response(body=self.data) if fits else web.Response(status=404)


async def test_the_probe_of_an_uploader_reads_a_signed_address(server, lens):
    async with SignedFiles() as files:
        await lens(uploader=files).probes()["uploader"]()
