"""Real MCP servers over the standard streams of a process and over HTTP on this machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import ImageBook, ToolExecutor, mcp_session
from opensearch_lightning.tools.mcp import mcp_tools
from opensearch_lightning.tools.protocol import ClosableTool
from opensearch_lightning.tools.secrets import MissingKeyError
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, FakeTool, book, call

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER]
NAMES = ["add", "find", "fail", "picture", "size", "slow", "hang", "die", "pid", "variable", "contents"]
SECRET = "s3cret-key-of-the-test"


@contextmanager
def http_server(folder, key=None, port=None):
    """A server on this machine; yields its url, its process, and the file that makes it refuse."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    refusal = folder / "refusal"
    environment = {**os.environ, "MCP_TEST_REFUSAL": str(refusal), **({"MCP_TEST_KEY": key} if key else {})}
    process = subprocess.Popen([*COMMAND, str(port)], env=environment)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process, refusal
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def listed():
    """The tools of the server over its standard streams."""
    return mcp_tools(command=COMMAND)


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A server over HTTP that asks for a key: url and file."""
    with http_server(tmp_path_factory.mktemp("http"), SECRET) as (url, _, refusal):
        yield url, refusal


@pytest.fixture(scope="module")
def listed_over_http(http):
    """The tools of the server over HTTP."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MCP_TEST_TOKEN", SECRET)
        return mcp_tools(url=http[0], token_env="MCP_TEST_TOKEN")


@pytest.fixture(scope="module")
def shared(listed):
    """One executor for many tests, which leave it a session that works."""
    executor = ToolExecutor(listed, timeout_s=20)
    yield executor
    asyncio.run(executor.aclose())


@pytest.fixture(params=["stdio", "http"])
def tools(request):
    """The same tools over either transport."""
    return request.getfixturevalue("listed" if request.param == "stdio" else "listed_over_http")


@pytest.fixture
def executor(tools, listed, request):
    """An executor of them that is not closed, for the session is shared."""
    return request.getfixturevalue("shared") if tools is listed else ToolExecutor(tools, timeout_s=20)


async def ask(executor, name, /, images=None, **arguments):
    result = await executor.execute(call(name, **arguments), images or book(), KEY)
    return result.error, result.text


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_listing(listed):
    assert [tool.name for tool in listed] == NAMES
    assert {tool.backend for tool in listed} == {"Test server"}
    function = listed[0].schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a", "b"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert listed[3].schema["function"]["parameters"]["properties"] == {}
    assert all(isinstance(tool, ClosableTool) for tool in listed)


async def test_calls_and_nested_arguments(executor):
    assert await ask(executor, "add", a=1, b=2.0) == (None, "3")
    filters = {"tags": ["a", "b"], "part_of": {"tags": [], "year": 1987}}
    error, text = await ask(executor, "find", filters=filters, sizes=[1, 2])
    assert error is None
    assert '"part_of": {"tags": [], "year": 1987, "part_of": null}' in text
    for wrong, message in [
        ({"filters": {"tags": ["a", 1]}}, "filters.tags[1] must be of type string, not 1."),
        ({"filters": {"tags": [], "part_of": {}}}, 'filters.part_of lacks ["tags"].'),
        ({"filters": "tags"}, 'filters must be of type object, not "tags".'),
        ({}, "filters is missing."),
    ]:
        assert await ask(executor, "find", **wrong) == (
            ErrorKind.INVALID_ARGUMENT, f"Error: invalid_argument. {message}",
        )  # fmt: skip


async def test_a_key_that_the_server_sends_back_is_not_shown(listed_over_http):
    tool = listed_over_http[NAMES.index("variable")]
    assert (await tool.run({"name": "MCP_TEST_KEY"}, ImageBook())).text == "***"


async def test_half_characters_in_nested_arguments_do_not_break_the_session(shared):
    error, text = await ask(shared, "find", filters={"tags": ["\ud800"]})
    assert (error, text) == (ErrorKind.INVALID_ARGUMENT, "Error: invalid_argument. filters holds half a character.")
    assert await ask(shared, "add", a=1, b=2) == (None, "3")


async def test_what_the_server_calls_an_error_is_one_in_its_words(shared):
    error, text = await ask(shared, "fail", text="no such\npage " + "x" * 5000)
    assert error is ErrorKind.BACKEND_ERROR
    assert text.startswith("Error: backend_error. Error executing tool fail: no such page xxx")
    assert len(text) < 400
    # a text that quotes an error is none
    assert (await ask(shared, "find", filters={"tags": ["Error executing tool"]}))[0] is None


async def test_pictures(shared):
    result = await shared.execute(call("picture"), book(), KEY)
    assert result.text == "img_2: 30x20 pixels. A blue field. Only the first of 2 pictures is given."
    assert result.image.size == (30, 20)
    assert result.image.mode == "RGB"
    assert result.image.getpixel((5, 5)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("resources", None, "img_2: 4x4 pixels. Text of a file.\npage: http://velmora.test/ "
         "Left out, since only text and pictures can be given: a file of type x/zip."),
        ("audio", None, "Left out, since only text and pictures can be given: audio."),
        ("no picture", ErrorKind.BACKEND_ERROR,
         "Error: backend_error. The tool contents returned a picture that is none."),
        ("text and no picture", None, "Here. The picture of the result cannot be read."),
        ("no base64", ErrorKind.BACKEND_ERROR,
         "Error: backend_error. The tool contents returned a picture that is none."),
        ("structured", None, '{"emblem": "höhle"}'),
        ("none", None, "The tool returned nothing."),
        ("long", None, "x" * 20_000 + " Only the first 20000 of 30000 characters are shown."),
    ],
)  # fmt: skip
async def test_contents(shared, kind, error, text):
    assert await ask(shared, "contents", kind=kind) == (error, text)


async def test_options(make, monkeypatch):
    monkeypatch.setenv("MCP_TEST_GIVEN", "given")
    monkeypatch.setenv("MCP_TEST_KEPT", "kept")
    tools = mcp_tools(
        command=COMMAND,
        names=["variable", "size"],
        prefix="files_",
        backend="files",
        env_names=["MCP_TEST_GIVEN"],
        image_arguments={"size": {"photo": "base64", "other": "data_url"}},
    )
    assert [tool.name for tool in tools] == ["files_variable", "files_size"]
    assert {tool.backend for tool in tools} == {"files"}
    executor = make(tools, FakeTool(name="size"), timeout_s=20)
    assert await ask(executor, "files_variable", name="MCP_TEST_GIVEN") == (None, "given")
    assert await ask(executor, "files_variable", name="MCP_TEST_KEPT") == (None, "nothing")
    assert await ask(executor, "files_variable", name="PATH") == (None, os.environ["PATH"])
    photo = tools[1].schema["function"]["parameters"]["properties"]["photo"]
    assert (photo["type"], photo["format"]) == ("string", "image-id")
    images = book(Image.new("RGB", (10, 8)), Image.new("RGB", (7, 5)))
    expected = (None, "[(10, 8), (7, 5)] data:image/png;base64,")
    assert await ask(executor, "files_size", images, photo="img_1", other="img_2") == expected
    assert await ask(executor, "files_size", images, photo="img_2") == (None, "[(7, 5)] ")
    assert (await ask(executor, "files_size", images, photo="img_3"))[0] is ErrorKind.UNKNOWN_IMAGE


def test_the_whole_environment_only_if_asked(monkeypatch):
    monkeypatch.setenv("MCP_TEST_KEPT", "kept")
    assert mcp_session.Endpoint(command=("x",)).environment() == {}
    assert mcp_session.Endpoint(command=("x",), env_names="all").environment() == dict(os.environ)


async def test_a_slow_call_times_out_while_others_run(executor, tools):
    assert await ask(executor, "add", a=1, b=2) == (None, "3")
    executor = ToolExecutor(tools, timeout_s=1.5)
    started = time.monotonic()
    slow, short, quick = await asyncio.gather(
        ask(executor, "slow", seconds=60), ask(executor, "slow", seconds=0.5), ask(executor, "add", a=2, b=2)
    )
    assert time.monotonic() - started < 4
    assert slow[0] is ErrorKind.TIMEOUT
    assert (short, quick) == ((None, "waited"), (None, "4"))
    assert await ask(executor, "add", a=3, b=2) == (None, "5")


async def test_calls_run_side_by_side(executor):
    await ask(executor, "add", a=1, b=2)
    started = time.monotonic()
    results = await asyncio.gather(*(ask(executor, "slow", seconds=0.5) for _ in range(10)))
    assert results == [(None, "waited")] * 10
    assert time.monotonic() - started < 2.5


async def test_a_cancelled_call_leaves_the_session_as_it_is(make, tools):
    executor = make(tools, timeout_s=20)
    await tools[0].aclose()
    other = asyncio.create_task(ask(executor, "slow", seconds=1.5))
    # the first of these is cancelled while the session is being opened
    for wait in (0.0, 1.0, 0.1):
        cancelled = asyncio.create_task(ask(executor, "slow", seconds=60))
        await asyncio.sleep(wait)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert await other == (None, "waited")
    before = await ask(executor, "pid")
    assert await ask(executor, "add", a=1, b=2) == (None, "3")
    assert await ask(executor, "pid") == before


async def test_a_server_that_dies_is_started_again(shared):
    executor = shared
    executor.reset()
    _, first = await ask(executor, "pid")
    waiting = asyncio.create_task(ask(executor, "slow", seconds=60))
    await asyncio.sleep(0.2)
    os.kill(int(first), signal.SIGKILL)
    error, text = await waiting
    assert error is ErrorKind.UNREACHABLE
    assert text == "Error: unreachable. The tool slow cannot be reached; try again or go on another way."
    error, second = await ask(executor, "pid")
    assert error is None
    assert second != first
    # between calls: the next one meets it
    os.kill(int(second), signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert (await ask(executor, "pid"))[0] is ErrorKind.UNREACHABLE
    assert await ask(executor, "add", a=1, b=2) == (None, "3")
    assert executor.metrics().tools["pid"].errors == {ErrorKind.UNREACHABLE: 1}


async def test_a_server_over_http_that_is_started_again(make, tmp_path):
    with http_server(tmp_path) as (url, process, _):
        tools = mcp_tools(url=url, timeout_s=5)
        executor = make(tools, timeout_s=20)
        assert await ask(executor, "add", a=1, b=2) == (None, "3")
        waiting = asyncio.create_task(ask(executor, "slow", seconds=60))
        await asyncio.sleep(0.3)
        process.kill()
        process.wait()
        assert (await waiting)[0] is ErrorKind.UNREACHABLE
        assert (await ask(executor, "add", a=1, b=2))[0] is ErrorKind.UNREACHABLE
    with http_server(tmp_path, port=int(url.split(":")[2].split("/")[0])):
        assert await ask(executor, "add", a=1, b=2) == (None, "3")


async def test_a_server_that_hangs_is_started_again(shared, monkeypatch):
    monkeypatch.setattr(mcp_session, "_CHECK_SECONDS", 0.2)
    executor = shared
    _, first = await ask(executor, "pid")
    calls = [asyncio.create_task(ask(executor, "hang", seconds=60)) for _ in range(3)]
    await asyncio.sleep(0.3)
    for waiting in calls:
        waiting.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0.5)
    error, second = await ask(executor, "pid")
    assert error is None
    assert second != first
    for _ in range(400):
        if not alive(int(first)):
            break
        await asyncio.sleep(0.05)
    assert not alive(int(first))


async def test_slow_calls_that_are_given_up_do_not_end_a_server_that_answers(shared):
    executor = shared
    first = await ask(executor, "pid")
    for _ in range(2):
        given_up = [asyncio.create_task(ask(executor, "slow", seconds=60)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for waiting in given_up:
            waiting.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await asyncio.sleep(0.3)
    assert await ask(executor, "pid") == first


async def test_no_process_outlives_its_executor(make, listed):
    executor = make(listed, timeout_s=20)
    pids = [await ask(executor, "pid")]
    await executor.aclose()
    pids.append(await ask(executor, "pid"))
    waiting = asyncio.create_task(ask(executor, "hang", seconds=60))
    await asyncio.sleep(0.1)
    await executor.aclose()
    with suppress(asyncio.CancelledError):
        await waiting
    assert len({pid for _, pid in pids}) == 2
    assert not any(alive(int(pid)) for _, pid in pids)


@pytest.mark.parametrize(("transport", "close"), [("listed", False), ("listed_over_http", True)])
def test_tools_work_on_another_loop(request, transport, close):
    tools = request.getfixturevalue(transport)

    async def add():
        output = await tools[0].run({"a": 1, "b": 2}, ImageBook())
        for tool in tools[:2] if close else ():
            await tool.aclose()
        return output.text

    assert [asyncio.run(add()), asyncio.run(add())] == ["3", "3"]


async def test_probes(listed, listed_over_http, http):
    probes = listed[0].probes()
    assert list(probes) == ["Test server"]
    assert await probes["Test server"]() is None
    _, refusal = http
    probe = listed_over_http[0].probes()["Test server"]
    assert await probe() is None
    refusal.write_text("503")
    try:
        with pytest.raises(ToolError, match=r"cannot be reached: it answered with status 503\.$") as caught:
            await probe()
    finally:
        refusal.unlink()
    assert caught.value.kind is ErrorKind.UNREACHABLE


@pytest.mark.parametrize(
    ("status", "kind", "wait"),
    [
        (429, ErrorKind.RATE_LIMITED, 7.0),
        (503, ErrorKind.UNREACHABLE, None),
        (401, ErrorKind.BACKEND_ERROR, None),
        (500, ErrorKind.BACKEND_ERROR, None),
    ],
)
async def test_statuses_of_http(http, listed_over_http, status, kind, wait):
    _, refusal = http
    tool = listed_over_http[0]
    assert (await tool.run({"a": 1, "b": 2}, ImageBook())).text == "3"
    refusal.write_text(str(status))
    try:
        with pytest.raises(ToolError) as caught:
            await tool.run({"a": 1, "b": 2}, ImageBook())
    finally:
        refusal.unlink()
    assert (caught.value.kind, caught.value.retry_after_s) == (kind, wait)
    assert (await tool.run({"a": 1, "b": 2}, ImageBook())).text == "3"


SILENT = [sys.executable, "-c", "import sys; sys.stdin.read()"]
BROKEN = [sys.executable, "-c", "import velmora_is_missing"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["no-such-program-here", "x"]}, r"`no-such-program-here x` could not be started: .*No such file"),
        (
            {"command": SILENT, "timeout_s": 0.5},
            r"sys\.stdin\.read\(\)'` could not be started: no answer within 0\.5 s",
        ),
        ({"command": BROKEN}, r"in env_names .*Its last words: ModuleNotFoundError: No module named 'velmora"),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            r"http://127\.0\.0\.1:9/mcp could not be reached: .*; look whether it runs",
        ),
    ],
)
def test_servers_that_do_not_start(options, message):
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match=message) as caught:
        mcp_tools(**options)
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)


def test_servers_over_http_that_do_not_answer_rightly(http, monkeypatch):
    with pytest.raises(ConfigurationError, match="it refused the key; look whether"):
        mcp_tools(url=http[0])
    monkeypatch.setenv("MCP_TEST_TOKEN", "another-key")
    with pytest.raises(ConfigurationError, match="it refused the key in MCP_TEST_TOKEN") as caught:
        mcp_tools(url=http[0], token_env="MCP_TEST_TOKEN")
    assert "another" not in str(caught.value)
    monkeypatch.setenv("MCP_TEST_TOKEN", SECRET)
    with pytest.raises(ConfigurationError, match="status 404; look whether it runs and whether the path is right"):
        mcp_tools(url=http[0].replace("/mcp", "/other"), token_env="MCP_TEST_TOKEN")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ConfigurationError, match=r"no answer within 0\.5 s"):
            mcp_tools(url=f"http://127.0.0.1:{silent.getsockname()[1]}/mcp", timeout_s=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "not neither: set command"),
        ({"command": COMMAND, "url": "http://localhost/mcp"}, "not both: set command"),
        ({"command": "python server.py"}, "set a list of texts"),
        ({"command": COMMAND, "timeout_s": 0}, "timeout_s of an MCP server is 0"),
        ({"command": COMMAND, "max_chars": 0}, "max_chars is 0"),
        ({"command": COMMAND, "token_env": "MCP_TEST_TOKEN"}, "token_env is for a url"),
        ({"command": COMMAND, "env_names": "PATH"}, "must be a list of names, or 'all'"),
        ({"command": COMMAND, "env_names": ["sk-12345"]}, "are names of environment variables"),
        ({"url": "localhost:8000"}, "is 'localhost:8000': set one such as"),
        ({"url": "http://me:word@localhost/mcp"}, "holds a user name"),
        ({"url": "http://localhost/mcp", "env_names": ["PATH"]}, "are for a command"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        mcp_tools(**options)
    assert not any(secret in str(caught.value) for secret in ("sk-12345", "word@"))


@pytest.mark.parametrize(
    "options", [{"url": "http://localhost/mcp", "token_env": "MCP_TEST_NONE"},
                {"command": COMMAND, "env_names": ["MCP_TEST_NONE"]}],
)  # fmt: skip
def test_missing_variables_are_named(options):
    with pytest.raises(MissingKeyError, match="MCP_TEST_NONE.* is not set"):
        mcp_tools(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["add", "sub"]}, r"has no tools \['sub'\]: choose from \['add', 'contents'"),
        ({"names": []}, "name at least one"),
        ({"names": ["add", "add"]}, "each once"),
        ({"image_arguments": {"sub": {"a": "base64"}}}, "image_arguments names 'sub'"),
        (
            {"image_arguments": {"size": {"a": "base64"}}},
            r"size has no parameter 'a': choose from \['other', 'photo'\]",
        ),
        ({"image_arguments": {"size": {"photo": "png"}}}, "size.photo is 'png': choose"),
        ({"image_arguments": {"add": {"a": "base64"}}}, "a of add is of type integer"),
    ],
)
def test_options_that_do_not_fit_the_server(http, monkeypatch, options, message):
    monkeypatch.setenv("MCP_TEST_TOKEN", SECRET)
    with pytest.raises(ConfigurationError, match=message):
        mcp_tools(url=http[0], token_env="MCP_TEST_TOKEN", **options)


def test_names_that_clash_are_refused(listed):
    with pytest.raises(ConfigurationError, match="Two tools have one name"):
        ToolExecutor([listed, FakeTool(name="add")])
