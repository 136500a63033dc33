import asyncio
import multiprocessing
import sqlite3

import numpy as np
import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import FaultInjector, ResultCache, ToolExecutor, ToolOutput, crop_tool
from opensearch_lightning.tools.cache import cache_key
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, FakeTool, book, call

PICTURE = {"picture": {"type": "string", "format": "image-id"}}


async def run(tool, cache, *calls, images=None, **options):
    executor = ToolExecutor([tool], cache=cache, **options)
    try:
        return [await executor.execute(action, images or book(), KEY) for action in calls], executor.metrics()
    finally:
        await executor.aclose()


def noise(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 30, 3), np.uint8))


def test_keys():
    def key(namespace="", tool="t", arguments=None, **digests):
        return cache_key(namespace, tool, arguments or {"a": 1, "b": "img_1"}, digests)

    assert key(b="d1") == cache_key("", "t", {"b": "img_5", "a": 1}, {"b": "d1"})
    others = [key(b="d1"), key(b="d2"), key(), key("world", b="d1"), key(tool="u", b="d1"), key(arguments={"b": "d1"})]
    assert len(set(others)) == len(others)
    assert cache_key("", "t", {"q": "\ud800"}, {})


async def test_equal_calls_run_once():
    tool = FakeTool(q={"type": "string"})
    results, metrics = await run(tool, ResultCache(), call("fake", q="a"), call("fake", q="a"), call("fake", q="b"))
    assert [result.cached for result in results] == [False, True, False]
    assert results[0].text == results[1].text
    assert tool.runs == 2
    assert metrics.tools["fake"].cache_hits == 1


async def test_without_a_cache_every_call_runs():
    tool = FakeTool()
    await run(tool, None, call("fake"), call("fake"))
    assert tool.runs == 2


async def test_one_picture_under_two_names_is_one_look_up():
    tool = FakeTool(**PICTURE)
    images = book(noise(), noise(), noise(1))
    calls = [call("fake", picture=f"img_{i}") for i in (1, 2, 3)]
    results, _ = await run(tool, ResultCache(), *calls, images=images)
    assert [result.cached for result in results] == [False, True, False]
    assert tool.runs == 2


async def test_one_name_for_two_pictures_is_two_look_ups():
    tool, cache = FakeTool(**PICTURE), ResultCache()
    await run(tool, cache, call("fake", picture="img_1"), images=book(noise()))
    await run(tool, cache, call("fake", picture="img_1"), images=book(noise(1)))
    assert tool.runs == 2


async def test_calls_at_one_time_share_one_run():
    async def work():
        await asyncio.sleep(0.05)
        return ToolOutput(text="slow")

    tool = FakeTool(work)
    executor = ToolExecutor([tool], cache=ResultCache())
    results = await asyncio.gather(*(executor.execute(call("fake"), book(), KEY) for _ in range(8)))
    await executor.aclose()
    assert tool.runs == 1
    assert sorted(result.cached for result in results) == [False] + [True] * 7


async def test_a_cancelled_caller_does_not_take_the_others_down():
    async def work():
        await asyncio.sleep(0.2)
        return ToolOutput(text="slow")

    tool = FakeTool(work)
    executor = ToolExecutor([tool], cache=ResultCache())
    first, second = (asyncio.create_task(executor.execute(call("fake"), book(), KEY)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).text == "slow"
    assert tool.runs == 1

    alone = asyncio.create_task(executor.execute(call("fake", other=1), book(noise()), KEY))
    await alone
    await executor.aclose()


async def test_when_all_callers_are_cancelled_so_is_the_run():
    async def work():
        await asyncio.sleep(30)
        return ToolOutput()

    tool = FakeTool(work)
    executor = ToolExecutor([tool], cache=ResultCache())
    callers = [asyncio.create_task(executor.execute(call("fake"), book(), KEY)) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert tool.running == 1
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    await asyncio.sleep(0.1)
    assert tool.running == 0
    await executor.aclose()


async def test_failures_are_not_kept():
    outcomes = [ValueError("x"), ToolOutput(text="fine")]

    async def work():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    tool = FakeTool(work)
    results, _ = await run(tool, ResultCache(), call("fake"), call("fake"), call("fake"))
    assert [result.error for result in results] == [ErrorKind.BACKEND_ERROR, None, None]
    assert [result.cached for result in results] == [False, False, True]


async def test_injected_faults_strike_kept_results_too():
    tool, cache = FakeTool(), ResultCache()
    await run(tool, cache, call("fake"))
    faults = FaultInjector(0, {ErrorKind.UNREACHABLE: 1.0})
    results, _ = await run(tool, cache, call("fake"), faults=faults)
    assert (results[0].error, results[0].injected, results[0].cached) == (ErrorKind.UNREACHABLE, True, False)


async def test_kept_images_get_the_name_of_the_moment():
    async def work():
        return ToolOutput(image=noise())

    tool, cache = FakeTool(work), ResultCache()
    (first,), _ = await run(tool, cache, call("fake"), images=book())
    (second,), _ = await run(tool, cache, call("fake"), images=book(noise(1), noise(2)))
    assert first.text.startswith("img_2: 30x20")
    assert second.text.startswith("img_3: 30x20")
    assert second.cached


async def test_memory_is_bounded_and_the_oldest_goes_first():
    cache = ResultCache(max_bytes=3000)
    big = ToolOutput(text="x" * 500)
    for name in "abc":
        await cache.put(name, big)
    assert await cache.get("a") is not None
    await cache.put("d", big)
    assert await cache.get("b") is None
    assert await cache.get("a") is None or await cache.get("d") is not None
    await cache.put("huge", ToolOutput(text="x" * 10_000))
    assert await cache.get("huge") is None


async def test_file_keeps_everything_exactly(tmp_path):
    output = ToolOutput(text="text ünï", image=noise(), hits=3, note="note")
    first = ResultCache(tmp_path / "deep" / "cache.sqlite")
    await first.put("key", output)
    first.close()
    kept = await ResultCache(tmp_path / "deep" / "cache.sqlite").get("key")
    assert (kept.text, kept.hits, kept.note) == ("text ünï", 3, "note")
    assert np.array_equal(np.asarray(kept.image), np.asarray(output.image))
    with sqlite3.connect(tmp_path / "deep" / "cache.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT image FROM results").fetchone()[0].startswith(b"\x89PNG")
    bare = ToolOutput(text="bare")
    await first.put("bare", bare)
    assert await ResultCache(tmp_path / "deep" / "cache.sqlite").get("bare") == bare
    first.close()


async def test_a_transparent_picture_comes_back_on_white(tmp_path):
    picture = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    await ResultCache(tmp_path / "cache.db").put("key", ToolOutput(image=picture))
    kept = await ResultCache(tmp_path / "cache.db").get("key")
    assert kept.image.getpixel((0, 0)) == (255, 255, 255)


async def test_namespaces_do_not_mix(tmp_path):
    path = tmp_path / "cache.sqlite"
    tool = FakeTool()
    for namespace in ("one", "two", "one"):
        await run(tool, ResultCache(path, namespace=namespace), call("fake"))
    assert tool.runs == 2


def write_many(path, start):
    async def work():
        cache = ResultCache(path)
        for i in range(start, start + 50):
            await cache.put(f"key{i}", ToolOutput(text=str(i)))
        cache.close()

    asyncio.run(work())


async def test_processes_share_the_file(tmp_path):
    path = tmp_path / "cache.sqlite"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_many, args=(path, start)) for start in (0, 25, 0, 25)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    cache = ResultCache(path)
    assert [(await cache.get(f"key{i}")).text for i in range(75)] == [str(i) for i in range(75)]
    cache.close()


async def test_a_file_that_breaks_costs_no_call(tmp_path):
    path = tmp_path / "cache.sqlite"
    cache = ResultCache(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE results")
    tool = FakeTool()
    with pytest.warns(UserWarning, match="going on without"):
        results, _ = await run(tool, cache, call("fake"))
    assert results[0].text == "done"


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"this is no database, and long enough to be seen as none" * 10)
    with pytest.raises(ConfigurationError, match="remove it or name another"):
        ResultCache(path)


async def test_results_of_a_tool_that_works_otherwise_are_not_given(tmp_path):
    path = tmp_path / "cache.sqlite"
    picture = Image.new("RGB", (2000, 1000), "red")
    boxed = call("crop", image="img_1", x=0, y=0, width=500, height=500)
    sizes = []
    for coordinates in ("pixels", "relative_1000", "pixels"):
        (result,), _ = await run(crop_tool(coordinates=coordinates), ResultCache(path), boxed, images=book(picture))
        sizes.append((result.image.size, result.cached))
    assert sizes == [((500, 500), False), ((1000, 500), False), ((500, 500), True)]


async def test_results_of_another_variant_are_not_given(tmp_path):
    tool = FakeTool()
    seen = []
    for variant in ("one model", "another", "one model"):
        tool.variant = variant
        (result,), _ = await run(tool, ResultCache(tmp_path / "cache.sqlite"), call("fake"))
        seen.append(result.cached)
    assert seen == [False, False, True]
