import asyncio
import contextlib
import logging
import sqlite3

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, DataError, ToolError
from opensearch_lightning.tools import CallKey, Recorder, Replay, ResultCache, ToolExecutor, ToolOutput
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import FakeTool, book, call

QUERY = {"q": {"type": "string"}}
PICTURE = {"picture": {"type": "string", "format": "image-id"}}


def key(task="task", rollout=0, step=0):
    return CallKey(task_id=task, rollout=rollout, step=step)


def drifting(**properties):
    """A tool that never gives the same answer twice, and fails at every third call."""
    counts = iter(range(1000))

    async def work():
        count = next(counts)
        if count % 3 == 2:
            raise ToolError(ErrorKind.RATE_LIMITED, f"Too many, at {count}.")
        image = Image.new("RGB", (4, 3 + count), (count, 0, 0)) if properties == PICTURE else None
        return ToolOutput(text=f"answer {count}", image=image, hits=count, note=f"Note {count}.")

    return FakeTool(work, **(properties or QUERY))


async def record(path, tool, *calls, **options):
    executor = ToolExecutor([tool], recorder=Recorder(path), **options)
    try:
        return [await executor.execute(action, images, where) for action, images, where in calls]
    finally:
        await executor.aclose()


async def replay(path, *calls):
    executor = ToolExecutor.replaying(path)
    try:
        return [await executor.execute(action, images, where) for action, images, where in calls]
    finally:
        await executor.aclose()


def same(first, second):
    assert (first.tool, first.text, first.error, first.hits, first.note) == (
        second.tool, second.text, second.error, second.hits, second.note,
    )  # fmt: skip
    assert (first.image is None) == (second.image is None)
    if first.image is not None:
        assert first.image.tobytes() == second.image.tobytes()


async def test_a_recorded_run_replays_call_for_call(tmp_path):
    path = tmp_path / "calls.sqlite"
    calls = [(call("fake", q=query), book(), key(step=i)) for i, query in enumerate("aababcacb")]
    recorded = await record(path, drifting(), *calls)
    assert {result.error for result in recorded} == {None, ErrorKind.RATE_LIMITED}
    replayed = await replay(path, *reversed(calls))
    for before, after in zip(recorded, reversed(replayed), strict=True):
        same(before, after)


async def test_images_come_back_pixel_for_pixel_and_go_by_content(tmp_path):
    path = tmp_path / "calls.sqlite"
    red, blue = Image.new("RGB", (5, 5), "red"), Image.new("RGB", (5, 5), "blue")
    first = (call("fake", picture="img_1"), book(red), key())
    (recorded,) = await record(path, drifting(**PICTURE), first)
    again, other = await replay(
        path, (call("fake", picture="img_2"), book(blue, red), key()), (first[0], book(blue), key())
    )
    assert again.image.tobytes() == recorded.image.tobytes()
    assert again.text.startswith("img_3: 4x3 pixels. answer 0")
    assert other.error is ErrorKind.BACKEND_ERROR


async def test_a_call_made_elsewhere_gets_the_last_success_of_an_equal_one(tmp_path):
    path = tmp_path / "calls.sqlite"
    recorded = await record(path, drifting(), *((call("fake", q="a"), book(), key(step=i)) for i in range(3)))
    assert recorded[2].error
    (elsewhere,) = await replay(path, (call("fake", q="a"), book(), key(rollout=5)))
    same(elsewhere, recorded[1])


async def test_a_call_that_was_not_recorded_says_so(tmp_path, caplog):
    path = tmp_path / "calls.sqlite"
    await record(path, drifting(), (call("fake", q="a"), book(), key()))
    (result,) = await replay(path, (call("fake", q="b"), book(), key()))
    assert (result.error, result.text) == (ErrorKind.BACKEND_ERROR, "Error: backend_error. This call was not recorded.")
    assert "fake" in caplog.text
    assert "'task'" in caplog.text


async def test_the_policys_own_errors_are_decided_anew(tmp_path):
    path = tmp_path / "calls.sqlite"
    await record(path, drifting(), (call("fake", q="a"), book(), key()))
    wrong, unknown = await replay(path, (call("fake", q=1), book(), key()), (call("elsewhere", q="a"), book(), key()))
    assert (wrong.error, unknown.error) == (ErrorKind.INVALID_ARGUMENT, ErrorKind.UNKNOWN_TOOL)


async def test_results_from_the_cache_are_recorded_too(tmp_path):
    path = tmp_path / "calls.sqlite"
    calls = [(call("fake", q="a"), book(), key(rollout=i)) for i in range(3)]
    recorded = await record(path, drifting(), *calls, cache=ResultCache())
    assert [result.cached for result in recorded] == [False, True, True]
    for result in await replay(path, *calls):
        assert result.text == recorded[0].text


async def test_timeouts_are_replayed_at_once(tmp_path):
    async def work():
        await asyncio.sleep(30)
        return ToolOutput()

    path = tmp_path / "calls.sqlite"
    asked = (call("fake", q="a"), book(), key())
    (recorded,) = await record(path, FakeTool(work, **QUERY), asked, timeout_s=0.2)
    async with asyncio.timeout(5):
        (replayed,) = await replay(path, asked)
    assert (replayed.error, replayed.text) == (recorded.error, recorded.text)
    assert replayed.error is ErrorKind.TIMEOUT


async def test_tools_and_schemas_are_those_recorded(tmp_path):
    path = tmp_path / "calls.sqlite"
    tool = drifting()
    await record(path, tool, (call("fake", q="a"), book(), key()))
    assert ToolExecutor.replaying(path).schemas == [tool.schema]


async def test_a_run_goes_on_in_its_file_and_another_set_of_tools_does_not(tmp_path):
    path = tmp_path / "calls.sqlite"
    asked = (call("fake", q="a"), book(), key())
    await record(path, drifting(), asked)
    await record(path, drifting(), (call("fake", q="b"), book(), key()))
    assert [result.error for result in await replay(path, asked, (call("fake", q="b"), book(), key()))] == [None, None]
    with pytest.raises(ConfigurationError, match="of other tools"):
        ToolExecutor([drifting(**PICTURE)], recorder=Recorder(path))
    with pytest.raises(ConfigurationError, match="of other tools"):
        ToolExecutor([drifting(), FakeTool(name="more")], recorder=Recorder(path))
    assert [tool.name for tool in Replay(path).tools()] == ["fake"]


async def test_concurrent_calls_are_all_there(tmp_path):
    path = tmp_path / "calls.sqlite"
    executor = ToolExecutor([drifting()], recorder=Recorder(path))
    calls = [(call("fake", q=str(i % 7)), book(), key(rollout=i)) for i in range(60)]
    recorded = await asyncio.gather(*(executor.execute(*asked) for asked in calls))
    await executor.aclose()
    for before, after in zip(recorded, await replay(path, *calls), strict=True):
        same(before, after)


async def test_a_recording_that_cannot_be_written_is_logged_and_fails_no_call(tmp_path, caplog, monkeypatch):
    path = tmp_path / "calls.sqlite"
    recorder = Recorder(path)
    executor = ToolExecutor([drifting()], recorder=recorder)
    await recorder._file.run(lambda connection: connection.execute("DROP TABLE calls"))
    with caplog.at_level(logging.ERROR):
        result = await executor.execute(call("fake", q="a"), book(), key())
    await executor.aclose()
    assert result.error is None
    assert "is missing in the recording" in caplog.text


def test_there_is_no_recording(tmp_path):
    with pytest.raises(DataError, match="no recording at"):
        Replay(tmp_path / "nothing.sqlite")
    assert not (tmp_path / "nothing.sqlite").exists()
    Recorder(tmp_path / "empty.sqlite").close()
    with pytest.raises(DataError, match="holds no tools"):
        Replay(tmp_path / "empty.sqlite")


async def test_rows_that_cannot_be_read_are_errors_and_a_foreign_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "calls.sqlite"
    asked = (call("fake", picture="img_1"), book(), key())
    await record(path, drifting(**PICTURE), asked)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE calls SET image = x'00ff'")
    (result,) = await replay(path, asked)
    assert (result.error, result.text) == (
        ErrorKind.BACKEND_ERROR,
        "Error: backend_error. This call cannot be read in the recording.",
    )
    foreign = tmp_path / "foreign.sqlite"
    with contextlib.closing(sqlite3.connect(foreign)) as connection, connection:
        connection.execute("CREATE TABLE tools (x TEXT)")
    before = foreign.read_bytes()
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to look into" * 10)
    for other in (foreign, tmp_path / "text.sqlite"):
        with pytest.raises(DataError, match="is no recording"):
            Replay(other)
    assert foreign.read_bytes() == before
    with pytest.raises(ConfigurationError, match="is no recording"):
        ToolExecutor([drifting()], recorder=Recorder(foreign))
