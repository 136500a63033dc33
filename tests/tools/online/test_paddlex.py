"""The PaddleX client against a server as strict as its documents, and against servers that misbehave."""

import asyncio
import base64
import io
import json

import pytest
from aiohttp import web
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import BackendPolicy, ToolExecutor
from opensearch_lightning.tools.online.paddlex import PaddleXLayoutParsing
from opensearch_lightning.tools.protocol import ClosableTool, Tool
from opensearch_lightning.tools.secrets import MissingKeyError
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, book, call
from tests.tools.loopback import LoopbackServer

FIELDS = {
    "file": str,
    "fileType": int,
    "useDocOrientationClassify": bool,
    "useDocUnwarping": bool,
    "useChartRecognition": bool,
    "visualize": bool,
}
HTML = "<html><body><table><tr><td>Built</td><td>1932</td></tr></table></body></html>"


def block(label, content, box=(10, 20, 90, 40), **more):
    return {"block_label": label, "block_content": content, "block_bbox": list(box), **more}


BLOCKS = [
    block("doc_title", "The Bridges", (5, 5, 95, 15), block_id=0, block_order=1),
    block("text", "Old town was\nbuilt of stone.", block_id=1, block_order=2),
    block("image", "", (10.4, 50.6, 90, 70), block_id=2, block_order=None),
    block("table", HTML, (10, 72, 90, 78), block_id=3, block_order=3),
    block("formula", "$$ a\n+ b $$", block_id=4, block_order=4),
]


def answer(blocks=BLOCKS, **page):
    pruned = {"model_settings": {"use_table_recognition": True}, "parsing_res_list": blocks, **page}
    markdown = {"text": "# The Bridges", "images": {}, "isStart": True, "isEnd": True}
    result = {
        "layoutParsingResults": [{"prunedResult": pruned, "markdown": markdown}],
        "dataInfo": {"width": 100, "height": 80, "type": "image"},
    }
    return {"logId": "1-2-3", "errorCode": 0, "errorMsg": "Success", "result": result}


def failure(status, code=None):
    body = {"logId": "1", "errorCode": status if code is None else code, "errorMsg": "a long story with a secret"}
    return web.json_response(body, status=status)


class PaddleX(LoopbackServer):
    """Answers as the documents say, or as ``behave`` does; keeps the bodies that it was sent."""

    client_max_size = 2**24

    def __init__(self, behave=None, token=None):
        self.behave = behave
        self.token = token
        self.bodies = []
        self.answer = answer()

    async def handle(self, request):
        if (request.method, request.path) != ("POST", "/layout-parsing"):
            return web.Response(status=404)
        if request.content_type != "application/json":
            return failure(422)
        if self.token is not None and request.headers.get("Authorization") != f"token {self.token}":
            return failure(401)
        body = await request.json()
        if body.keys() != FIELDS.keys() or any(type(body[name]) is not kind for name, kind in FIELDS.items()):
            return failure(422)
        image = Image.open(io.BytesIO(base64.b64decode(body["file"], validate=True)))
        if body["fileType"] != 1 or image.format != "PNG":
            return failure(422)
        self.bodies.append(body)
        self.image = image.convert("RGB")
        if self.behave is not None:
            return await self.behave(request)
        return web.json_response(self.answer)


async def parsed(tool, **arguments):
    """What the policy is told, through a real executor."""
    executor = ToolExecutor([tool], timeout_s=30)
    try:
        return await executor.execute(call("layout_parsing", image="img_1", **arguments), book(), KEY)
    finally:
        await executor.aclose()


async def test_blocks_in_the_order_of_the_list():
    async with PaddleX() as server:
        tool = PaddleXLayoutParsing(server.url)
        result = await parsed(tool)
        assert (result.error, result.note) == (None, None)
        assert result.text == f"The Bridges\nOld town was built of stone.\n{HTML}\n$$ a\n+ b $$"
        assert server.image.size == (100, 80)
        assert server.image.getpixel((50, 40)) == (255, 0, 0)
        switches = {name: server.bodies[0][name] for name in FIELDS if name != "file"}
        assert switches == {
            "fileType": 1,
            "useDocOrientationClassify": False,
            "useDocUnwarping": False,
            "useChartRecognition": False,
            "visualize": False,
        }


async def test_the_arguments_switch_what_the_server_does():
    async with PaddleX() as server:
        tool = PaddleXLayoutParsing(f"{server.url}/layout-parsing/")
        result = await parsed(tool, use_chart_recognition=True)
        # Charts are read here: no note.
        assert result.note is None
        await parsed(tool, use_doc_orientation_classify=True)
        used = [(body["useChartRecognition"], body["useDocOrientationClassify"]) for body in server.bodies]
        assert used == [(True, False), (False, True)]


async def test_boxes_are_shown_on_request():
    async with PaddleX() as server:
        server.answer = answer(doc_preprocessor_res={"angle": 90})
        result = await parsed(PaddleXLayoutParsing(server.url, show_boxes=True))
        assert result.text.startswith(
            "[doc_title] (5,5,95,15) The Bridges\n[text] (10,20,90,40) Old town was built of stone.\n"
            f"[image] (10,51,90,70)\n[table] (10,72,90,78) {HTML}\n"
        )
        assert "turned upright" in result.note
        server.answer = answer(doc_preprocessor_res={"angle": -1})
        assert (await parsed(PaddleXLayoutParsing(server.url, show_boxes=True))).note is None


async def test_nothing_found_and_older_servers():
    async with PaddleX() as server:
        server.answer = answer([])
        assert (await parsed(PaddleXLayoutParsing(server.url))).text == "No text found."
        server.answer = answer([block("text", "second"), {"block_label": "seal", "block_bbox": [0, 0, 1, 1]}])
        assert (await parsed(PaddleXLayoutParsing(server.url))).text == "second"


async def test_token(monkeypatch):
    monkeypatch.setenv("PADDLEX_TOKEN", "tok-secret-1")
    async with PaddleX(token="tok-secret-1") as server:
        tool = PaddleXLayoutParsing(server.url, api_key_env="PADDLEX_TOKEN")
        assert (await parsed(tool)).error is None
        refused = await parsed(PaddleXLayoutParsing(server.url))
        assert refused.error is ErrorKind.BACKEND_ERROR
        monkeypatch.setenv("PADDLEX_TOKEN", "tok-secret-2")
        refused = await parsed(PaddleXLayoutParsing(server.url, api_key_env="PADDLEX_TOKEN"))
        assert "PADDLEX_TOKEN" in refused.text
        assert "tok-secret" not in refused.text
    monkeypatch.delenv("PADDLEX_TOKEN")
    with pytest.raises(MissingKeyError, match="PADDLEX_TOKEN"):
        PaddleXLayoutParsing(server.url, api_key_env="PADDLEX_TOKEN")


def test_configuration():
    for url in ("localhost:8080", "file:///etc/passwd", "http://me:secret@localhost"):
        with pytest.raises(ConfigurationError, match="address of PaddleX"):
            PaddleXLayoutParsing(url)
    tool = PaddleXLayoutParsing("http://localhost:8080")
    assert isinstance(tool, ClosableTool)
    checked: Tool = tool
    assert (checked.name, checked.backend) == ("layout_parsing", "ocr")


def with_page(change):
    body = json.loads(json.dumps(answer()))
    change(body["result"]["layoutParsingResults"][0]["prunedResult"]["parsing_res_list"])
    return body


MALFORMED = {
    "no object": [1],
    "null": None,
    "empty": {},
    "no result": {"logId": "1", "errorCode": 0, "errorMsg": "Success"},
    "null result": {**answer(), "result": None},
    "text for code": {**answer(), "errorCode": "0"},
    "false for code": {**answer(), "errorCode": False},
    "no pages": {**answer(), "result": {"layoutParsingResults": []}},
    "pages an object": {**answer(), "result": {"layoutParsingResults": {"0": 1}}},
    "page a text": {**answer(), "result": {"layoutParsingResults": ["page"]}},
    "no list": {**answer(), "result": {"layoutParsingResults": [{"prunedResult": {}}]}},
    "list an object": answer({"0": BLOCKS[0]}),
    "list a text": answer("blocks"),
    "block null": answer([None]),
    "block a list": answer([["text", "words"]]),
    "label missing": with_page(lambda blocks: blocks[0].pop("block_label")),
    "label a number": answer([block(7, "words")]),
    "content a list": answer([block("text", ["words"])]),
    "box missing": with_page(lambda blocks: blocks[0].pop("block_bbox")),
    "box of three": answer([block("text", "words", (1, 2, 3))]),
    "box of texts": answer([block("text", "words", ("1", "2", "3", "4"))]),
    "box of true": answer([block("text", "words", (True, 2, 3, 4))]),
    "box not finite": answer([block("text", "words", (float("nan"), 2, 3, float("inf")))]),
    "box beyond floats": answer([block("text", "words", (10**400, 2, 3, 4))]),
}


async def test_malformed_answers_are_errors_of_the_backend():
    async with PaddleX() as server:
        tool = PaddleXLayoutParsing(server.url)
        for name, body in MALFORMED.items():
            server.answer = body
            with pytest.raises(ToolError, match="PaddleX answered something else") as caught:
                await tool.parse(Image.new("RGB", (8, 8)))
            assert caught.value.kind is ErrorKind.BACKEND_ERROR, name
        await tool.aclose()


async def silent(request):
    await asyncio.sleep(30)


async def slow(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(300):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


async def busy(request):
    return web.json_response({"errorCode": 429}, status=429, headers={"Retry-After": "7"})


async def broken(request):
    return failure(500)


async def failed(request):
    return failure(200, 500)


async def failed_busy(request):
    return failure(200, 429)


async def half(request):
    response = web.StreamResponse(headers={"Content-Length": "10000"})
    await response.prepare(request)
    await response.write(b'{"logId": "1", "errorCode": 0')
    request.transport.close()
    return response


async def page_of_html(request):
    return web.Response(text="<html>502 Bad Gateway</html>", content_type="text/html")


async def redirect(request):
    return web.Response(status=307, headers={"Location": "/elsewhere"})


async def huge(request):
    return web.Response(body=b" " * 200_000, content_type="application/json")


@pytest.mark.parametrize(
    ("behave", "kind", "message"),
    [
        (silent, ErrorKind.TIMEOUT, "did not answer in time"),
        (slow, ErrorKind.TIMEOUT, "did not answer in time"),
        (busy, ErrorKind.RATE_LIMITED, "Too many requests"),
        (broken, ErrorKind.BACKEND_ERROR, "status 500"),
        (failed, ErrorKind.BACKEND_ERROR, "PaddleX failed with code 500"),
        (failed_busy, ErrorKind.RATE_LIMITED, "PaddleX failed with code 429"),
        (half, ErrorKind.BACKEND_ERROR, "did not answer rightly"),
        (page_of_html, ErrorKind.BACKEND_ERROR, "no JSON"),
        (redirect, ErrorKind.BACKEND_ERROR, "redirects"),
        (huge, ErrorKind.BACKEND_ERROR, "more than 100000 bytes"),
    ],
)
async def test_servers_that_misbehave(behave, kind, message):
    async with PaddleX(behave) as server:
        tool = PaddleXLayoutParsing(server.url, timeout_s=0.5, max_bytes=100_000)
        result = await parsed(tool)
        assert result.error is kind
        assert message in result.text
        assert "secret" not in result.text
        with pytest.raises(ToolError, match=message):
            await tool.probes()["PaddleX"]()
        await tool.aclose()


async def test_no_server():
    async with PaddleX() as server:
        url = server.url
    assert (await parsed(PaddleXLayoutParsing(url))).error is ErrorKind.UNREACHABLE


async def test_retry_after_is_kept_and_a_retry_succeeds():
    async def once_busy(request):
        if len(server.bodies) == 1:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response(server.answer)

    async with PaddleX(once_busy) as server:
        tool = PaddleXLayoutParsing(server.url, policy=BackendPolicy(retries=1, backoff_s=0.01))
        assert (await parsed(tool)).error is None
        assert len(server.bodies) == 2
        server.behave = busy
        impatient = PaddleXLayoutParsing(server.url)
        with pytest.raises(ToolError) as caught:
            await impatient.parse(Image.new("RGB", (8, 8)))
        assert caught.value.retry_after_s == 7
        await impatient.aclose()


async def test_probe_is_one_real_call():
    async with PaddleX() as server:
        tool = PaddleXLayoutParsing(server.url)
        assert list(tool.probes()) == ["PaddleX"]
        await tool.probes()["PaddleX"]()
        assert len(server.bodies) == 1
        await tool.aclose()


async def test_it_works_again_on_another_loop_once_closed():
    async with PaddleX() as server:
        tool = PaddleXLayoutParsing(server.url)
        # Each executor has a loop of its own, and closes its tools.
        texts = [(await parsed(tool)).text for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(server.bodies) == 2
