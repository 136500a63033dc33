import asyncio
import contextlib
import io
import threading
import time

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import (
    NO_TOOL,
    BackendPolicy,
    CallKey,
    FaultInjector,
    ImageBook,
    LocalTool,
    Outage,
    Recorder,
    ResultCache,
    ToolExecutor,
    ToolMetrics,
    ToolOutput,
)
from opensearch_lightning.types import Action, ErrorKind
from tests.tools.fakes import KEY, FakeTool, Heartbeat, book, call, schema


def raising(error):
    async def work():
        raise error

    return FakeTool(work)


def sleeping(seconds, **options):
    async def work():
        await asyncio.sleep(seconds)
        return ToolOutput(text="slept")

    return FakeTool(work, **options)


def blocking(seconds, name="block", limit=4):
    def work(arguments, images):
        time.sleep(seconds)
        return ToolOutput(text="blocked")

    return LocalTool(name=name, backend=name, schema=schema(name), function=work, backend_limit=limit)


async def test_success(make):
    result = await make(FakeTool()).execute(call("fake"), book(), KEY)
    assert (result.tool, result.text, result.error, result.image, result.hits) == ("fake", "done", None, None, None)
    assert not result.cached
    assert not result.injected
    assert 0 < result.latency_s < 5


async def test_not_well_formed_but_readable_is_carried_out(make):
    action = Action(kind="tool_call", name="fake", arguments={}, well_formed=False)
    assert (await make(FakeTool()).execute(action, book(), KEY)).error is None


@pytest.mark.parametrize("kind", [ErrorKind.NO_ACTION, ErrorKind.SEVERAL_ACTIONS, ErrorKind.MALFORMED_CALL])
async def test_unreadable_actions_are_one_counted_error(make, kind):
    tool = FakeTool()
    executor = make(tool)
    result = await executor.execute(Action(kind="error", error=kind), book(), KEY)
    assert (result.tool, result.error) == (None, kind)
    assert result.text.startswith(f"Error: {kind}. ")
    assert tool.runs == 0
    assert executor.metrics().tools[NO_TOOL] == ToolMetrics(calls=1, errors={kind: 1})
    assert (await executor.execute(call("fake"), book(), KEY)).error is None


async def test_unknown_tool_names_the_known(make):
    result = await make(FakeTool(), FakeTool(name="other")).execute(call("python" * 30), book(), KEY)
    assert (result.tool, result.error) == (None, ErrorKind.UNKNOWN_TOOL)
    assert "known: fake, other" in result.text
    assert len(result.text) < 120


async def test_invalid_arguments_and_images_never_reach_the_tool(make):
    tool = FakeTool(picture={"type": "string", "format": "image-id"})
    executor = make(tool)
    for arguments, kind in [
        ({}, ErrorKind.INVALID_ARGUMENT),
        ({"picture": ["img_1"]}, ErrorKind.INVALID_ARGUMENT),
        ({"picture": "img_7"}, ErrorKind.UNKNOWN_IMAGE),
    ]:
        result = await executor.execute(call("fake", **arguments), book(), KEY)
        assert (result.tool, result.error) == ("fake", kind)
    assert tool.runs == 0
    assert executor.metrics().tools["fake"].errors == {ErrorKind.INVALID_ARGUMENT: 2, ErrorKind.UNKNOWN_IMAGE: 1}


async def test_aliases_of_tools(make):
    tool = FakeTool(name="text_search", q={"type": "string"})
    result = await make(tool).execute(call("web_search", query="x"), book(), KEY)
    assert (result.tool, result.error) == ("text_search", None)


async def test_a_tool_of_the_alias_name_comes_first(make):
    result = await make(FakeTool(name="web_search"), FakeTool(name="text_search")).execute(
        call("web_search"), book(), KEY
    )
    assert result.tool == "web_search"


async def test_tool_errors_keep_their_kind_and_text(make):
    result = await make(raising(ToolError(ErrorKind.RATE_LIMITED, "Too many."))).execute(call("fake"), book(), KEY)
    assert (result.error, result.text) == (ErrorKind.RATE_LIMITED, "Error: rate_limited. Too many.")


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), OSError("gone")])
async def test_other_exceptions_are_backend_errors_and_logged(make, error, caplog):
    result = await make(raising(error)).execute(call("fake"), book(), KEY)
    assert result.error is ErrorKind.BACKEND_ERROR
    assert result.text == "Error: backend_error. The tool fake failed; try again or go on another way."
    assert "The tool fake raised" in caplog.text


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(1), ZeroDivisionError()])
async def test_exceptions_in_threads_are_backend_errors(make, error):
    def work(arguments, images):
        raise error

    tool = LocalTool(name="bad", backend="bad", schema=schema("bad"), function=work, backend_limit=1)
    result = await make(tool).execute(call("bad"), book(), KEY)
    assert result.error is ErrorKind.BACKEND_ERROR


async def test_a_tool_that_returns_something_else(make):
    async def work():
        return "text"

    result = await make(FakeTool(work)).execute(call("fake"), book(), KEY)
    assert result.error is ErrorKind.BACKEND_ERROR


async def test_a_page_that_quotes_an_error_is_none(make):
    async def work():
        return ToolOutput(text="Error executing tool: timeout", hits=1)

    assert (await make(FakeTool(work)).execute(call("fake"), book(), KEY)).error is None


async def test_no_hits_is_no_error(make):
    async def work():
        return ToolOutput(text="No results.", hits=0)

    result = await make(FakeTool(work)).execute(call("fake"), book(), KEY)
    assert (result.error, result.hits, result.text) == (None, 0, "No results.")


async def test_image_results_tell_name_size_and_fallback(make):
    picture = Image.new("RGB", (30, 20))

    async def work():
        return ToolOutput(text="Made.", image=picture, note="Unchanged.")

    result = await make(FakeTool(work)).execute(call("fake", odd=1), book(), KEY)
    assert result.image is picture
    assert result.text == "img_2: 30x20 pixels. Made. Unchanged. Unknown arguments ignored: 'odd'."
    assert result.note == "Unchanged. Unknown arguments ignored: 'odd'."


async def test_responses_are_not_for_tools(make):
    with pytest.raises(ValueError, match="end the rollout"):
        await make(FakeTool()).execute(Action(kind="response", response="x"), book(), KEY)


async def test_timeout_leaves_others_alone(make):
    executor = make(sleeping(30, name="dead"), sleeping(0.2, name="slow"), timeout_s=0.4)
    started = time.perf_counter()
    dead, slow = await asyncio.gather(*(executor.execute(call(name), book(), KEY) for name in ("dead", "slow")))
    assert 0.4 <= time.perf_counter() - started < 2
    assert (dead.error, slow.error) == (ErrorKind.TIMEOUT, None)
    assert dead.text == "Error: timeout. The tool dead did not answer; try again or go on another way."


async def test_timeout_of_tools_that_block_or_ignore_cancellation(make):
    async def stubborn():
        deadline = time.perf_counter() + 0.6
        while time.perf_counter() < deadline:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.6)
        return ToolOutput()

    executor = make(FakeTool(stubborn), blocking(0.6), timeout_s=0.1)
    started = time.perf_counter()
    results = await asyncio.gather(*(executor.execute(call(name), book(), KEY) for name in ("fake", "block")))
    assert time.perf_counter() - started < 0.5
    assert [result.error for result in results] == [ErrorKind.TIMEOUT] * 2


@pytest.mark.parametrize("tool", ["thread", "coroutine"])
async def test_a_blocking_tool_does_not_stall_the_event_loop(make, tool):
    async def rude():
        time.sleep(2)  # noqa: ASYNC251 - what a careless tool does
        return ToolOutput(text="blocked")

    executor = make(blocking(2, name="fake") if tool == "thread" else FakeTool(rude))
    for _ in range(3):  # a busy machine may hold up the process itself
        async with Heartbeat() as heart:
            result = await executor.execute(call("fake"), book(), KEY)
        assert result.text == "blocked"
        if heart.longest_gap_s < 0.1:
            break
    assert heart.longest_gap_s < 0.1


async def test_blocking_tools_run_beside_each_other(make):
    executor = make(blocking(0.3, limit=8))
    started = time.perf_counter()
    await asyncio.gather(*(executor.execute(call("block"), book(), KEY) for _ in range(8)))
    assert time.perf_counter() - started < 1.2


async def test_concurrency_limit(make):
    tool = sleeping(0.02)
    executor = make(tool, max_concurrency=3)
    results = await asyncio.gather(*(executor.execute(call("fake"), book(), KEY) for _ in range(20)))
    assert tool.runs == 20
    assert tool.most_running == 3
    assert all(result.error is None for result in results)


async def test_waiting_for_a_turn_is_no_timeout(make):
    executor = make(blocking(0.1, limit=1), timeout_s=0.4)
    results = await asyncio.gather(*(executor.execute(call("block"), book(), KEY) for _ in range(8)))
    assert all(result.error is None for result in results)
    assert max(result.latency_s for result in results) > 0.6


async def test_a_narrow_backend_does_not_hold_up_others(make):
    executor = make(blocking(0.3, limit=1), FakeTool(), max_concurrency=2)
    crowd = [asyncio.create_task(executor.execute(call("block"), book(), KEY)) for _ in range(4)]
    await asyncio.sleep(0.05)
    result = await executor.execute(call("fake"), book(), KEY)
    assert result.latency_s < 0.2
    await asyncio.gather(*crowd)


async def test_cancellation_frees_the_turn(make):
    tool = sleeping(30)
    executor = make(tool, FakeTool(name="quick"), max_concurrency=1)
    stuck = asyncio.create_task(executor.execute(call("fake"), book(), KEY))
    await asyncio.sleep(0.1)
    assert tool.running == 1
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    result = await asyncio.wait_for(executor.execute(call("quick"), book(), KEY), 2)
    assert result.error is None
    assert tool.running == 0


async def test_a_timeout_frees_the_turn(make):
    executor = make(sleeping(30), FakeTool(name="quick"), max_concurrency=1, timeout_s=0.1)
    results = await asyncio.gather(*(executor.execute(call(name), book(), KEY) for name in ("fake", "quick")))
    assert [result.error for result in results] == [ErrorKind.TIMEOUT, None]


async def test_injected_faults_take_no_time_and_spare_the_tool(make):
    tool = FakeTool()
    executor = make(tool, faults=FaultInjector(0, {ErrorKind.TIMEOUT: 1.0}), timeout_s=5)
    result = await executor.execute(call("fake"), book(), KEY)
    assert (result.error, result.injected, tool.runs) == (ErrorKind.TIMEOUT, True, 0)
    assert result.text == "Error: timeout. The tool fake did not answer; try again or go on another way."
    assert result.latency_s < 0.1
    metrics = executor.metrics().tools["fake"]
    assert metrics == ToolMetrics(calls=1, errors={ErrorKind.TIMEOUT: 1}, injected=1)


async def test_injected_timeouts_may_take_time(make):
    executor = make(FakeTool(), faults=FaultInjector(0, {ErrorKind.TIMEOUT: 1.0}, timeout_s=0.15))
    assert (await executor.execute(call("fake"), book(), KEY)).latency_s >= 0.15


async def test_the_policys_own_errors_come_before_injected_ones(make):
    executor = make(FakeTool(), faults=FaultInjector(0, {ErrorKind.TIMEOUT: 1.0}))
    result = await executor.execute(call("nothing"), book(), KEY)
    assert (result.error, result.injected) == (ErrorKind.UNKNOWN_TOOL, False)


async def test_tools_of_one_backend_go_down_together(make):
    tools = [FakeTool(name="a", backend="x"), FakeTool(name="b", backend="x"), FakeTool(name="c", backend="y")]
    executor = make(*tools, faults=FaultInjector(0, outages={"x": Outage(rate=0.3)}))
    errors = {
        name: [
            (await executor.execute(call(name), book(), CallKey(task_id="t", rollout=r, step=s))).error
            for r in range(4)
            for s in range(10)
        ]
        for name in "abc"
    }
    assert errors["a"] == errors["b"]
    assert ErrorKind.UNREACHABLE in errors["a"]
    assert set(errors["c"]) == {None}


async def test_faults_do_not_depend_on_the_order_of_calls(make):
    def executor():
        return make(FakeTool(), faults=FaultInjector(5, {ErrorKind.TIMEOUT: 0.5}))

    keys = [CallKey(task_id=f"t{i}", rollout=i, step=i) for i in range(30)]
    one, other = executor(), executor()
    forward = [(await one.execute(call("fake"), book(), k)).error for k in keys]
    backward = await asyncio.gather(*(other.execute(call("fake"), book(), k) for k in reversed(keys)))
    assert forward == [result.error for result in reversed(backward)]


async def test_metrics_count_since_the_last_reset(make):
    executor = make(sleeping(0.02), FakeTool(name="idle"))
    for _ in range(3):
        await executor.execute(call("fake"), book(), KEY)
    before = executor.metrics()
    assert before.tools["fake"].calls == before.calls == 3
    assert before.errors == 0
    assert 0.02 <= before.tools["fake"].latency_p50_s <= before.tools["fake"].latency_p95_s
    assert before.tools["idle"] == ToolMetrics()
    executor.reset()
    assert executor.metrics().calls == 0
    assert before.calls == 3


def test_one_executor_serves_several_event_loops():
    executor = ToolExecutor([sleeping(0.01)], max_concurrency=2)

    async def batch():
        return await asyncio.gather(*(executor.execute(call("fake"), book(), KEY) for _ in range(6)))

    for _ in range(3):
        assert all(result.error is None for result in asyncio.run(batch()))
    asyncio.run(executor.aclose())


async def test_closing_stops_what_runs_and_a_later_call_starts_anew():
    tool = sleeping(30)
    executor = ToolExecutor([tool, FakeTool(name="quick")])
    executor.start()
    stuck = asyncio.create_task(executor.execute(call("fake"), book(), KEY))
    await asyncio.sleep(0.1)
    await executor.aclose()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert tool.running == 0
    assert (await executor.execute(call("quick"), book(), KEY)).error is None
    await executor.aclose()
    await executor.aclose()


class Limited(FakeTool):
    backend_limit = 0


def broken_schema():
    tool = FakeTool()
    tool.schema = {"type": "function", "function": {"name": "fake"}}
    return tool


def misnamed():
    tool = FakeTool()
    tool.schema = schema("other")
    return tool


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([], {}, "tool list is empty"),
        ([FakeTool(), FakeTool()], {}, "Two tools have one name"),
        ([FakeTool()], {"timeout_s": 0}, "timeout_s is 0"),
        ([FakeTool()], {"timeout_s": float("nan")}, "timeout_s is nan"),
        ([FakeTool()], {"max_concurrency": 0}, "max_concurrency is 0"),
        ([broken_schema()], {}, "schema of fake lacks 'parameters'"),
        ([misnamed()], {}, "schema of fake is that of other"),
        ([Limited()], {}, "backend_limit of fake is 0"),
        ([FakeTool()], {"faults": FaultInjector(0, outages={"typo": Outage(rate=0.1)})}, r"\['typo'\]"),
    ],
)
def test_bad_configurations_are_refused(tools, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ToolExecutor(tools, **options)


async def test_schemas_are_those_of_the_tools(make):
    tools = [FakeTool(name="b"), FakeTool(name="a")]
    assert make(*tools).schemas == [tool.schema for tool in tools]


def test_an_empty_book_is_fine():
    async def run():
        executor = ToolExecutor([FakeTool()])
        result = await executor.execute(call("fake"), ImageBook(), KEY)
        await executor.aclose()
        return result

    assert asyncio.run(run()).error is None


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), BaseException("odd")], ids=repr)
async def test_a_tool_that_would_end_the_process_is_a_backend_error(make, error):
    executor = make(raising(error), FakeTool(name="good"))
    result = await asyncio.wait_for(executor.execute(call("fake"), book(), KEY), 5)
    assert result.error is ErrorKind.BACKEND_ERROR
    # the loop goes on serving
    assert (await asyncio.wait_for(executor.execute(call("good"), book(), KEY), 5)).text == "done"


@pytest.mark.parametrize(
    "output", [{"image": b"png"}, {"image": "img_1"}, {"text": 3}, {"text": None}, {"text": b"x"}, {"note": 3}], ids=str
)
async def test_output_of_wrong_types_is_a_backend_error(make, output):
    async def work():
        return ToolOutput(**output)

    assert (await make(FakeTool(work)).execute(call("fake"), book(), KEY)).error is ErrorKind.BACKEND_ERROR


async def test_half_surrogate_pairs_never_reach_the_policy(make):
    async def work():
        return ToolOutput(text="a\ud800b é", note="c\udfff")

    result = await make(FakeTool(work)).execute(call("fake"), book(), KEY)
    assert (result.text, result.note) == ("a?b é c?", "c?")
    failing = make(raising(ToolError(ErrorKind.RATE_LIMITED, "wait \ud800")))
    assert (await failing.execute(call("fake"), book(), KEY)).text == "Error: rate_limited. wait ?"


async def test_a_place_left_empty_leaves_its_policies_and_outages_without_effect(make):
    policy = {"search": BackendPolicy(retries=1)}
    faults = FaultInjector(0, outages={"search": Outage(rate=1.0)})
    executor = ToolExecutor({"search": None, "other": FakeTool()}, backends=policy, faults=faults)
    assert (await executor.execute(call("fake"), book(), KEY)).error is None
    await executor.aclose()
    with pytest.raises(ConfigurationError, match="Policies of"):
        ToolExecutor({"other": FakeTool()}, backends=policy)
    with pytest.raises(ConfigurationError, match="tool list is empty"):
        ToolExecutor({"search": None})


async def test_several_tools_stand_in_one_place_and_the_order_is_that_of_the_places():
    first, second, third = (FakeTool(name=name) for name in "abc")
    executor = ToolExecutor({"one": [second, third], "two": first})
    assert [schema["function"]["name"] for schema in executor.schemas] == ["b", "c", "a"]


async def test_an_image_that_may_be_left_out(make):
    tool = FakeTool(picture={"type": "string", "format": "image-id", "default": None})
    tool.schema["function"]["parameters"]["required"] = []
    executor = make(tool)
    assert (await executor.execute(call("fake"), book(), KEY)).error is None
    assert (await executor.execute(call("fake", picture="img_9"), book(), KEY)).error is ErrorKind.UNKNOWN_IMAGE


async def test_threads_that_start_at_once_share_one_loop(make):
    executor = make(FakeTool())
    before = {thread for thread in threading.enumerate() if thread.name == "tool-loop"}
    barrier = threading.Barrier(6)

    def start():
        barrier.wait(10)
        executor.start()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    now = {thread for thread in threading.enumerate() if thread.name == "tool-loop"}
    assert len(now - before) == 1


class Connected(FakeTool):
    """Holds a connection to the loop that it ran on."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = None
        self.closed = []

    async def run(self, arguments, images):
        self.loop = asyncio.get_running_loop()
        return await super().run(arguments, images)

    async def aclose(self):
        self.closed.append(asyncio.get_running_loop() is self.loop)
        raise OSError("gone already")


async def test_tools_are_closed_on_their_loop_and_one_that_cannot_stops_no_other(caplog):
    tools = [Connected(), Connected()]
    tools[1].name, tools[1].schema = "second", schema("second")
    executor = ToolExecutor(tools)
    for _ in range(2):
        for name in ("fake", "second"):
            assert (await executor.execute(call(name), book(), KEY)).error is None
        await executor.aclose()
    assert [tool.closed for tool in tools] == [[True, True], [True, True]]
    assert "could not close" in caplog.text


def odd_image(kind):
    if kind == "truncated":
        buffer = io.BytesIO()
        Image.effect_noise((64, 64), 50).save(buffer, "PNG")
        return Image.open(io.BytesIO(buffer.getvalue()[:-300]))
    if kind == "closed":
        image = Image.new("RGB", (4, 4))
        image.close()
        return image
    return Image.new("RGB", (0, 3))


@pytest.mark.parametrize(
    "output",
    [
        *(lambda kind=kind: ToolOutput(image=odd_image(kind)) for kind in ("truncated", "closed", "empty")),
        lambda: ToolOutput(hits=2**70),
        lambda: ToolOutput(hits=-1),
        lambda: ToolOutput(hits=True),
    ],
)
async def test_outputs_that_cannot_be_given_are_one_error(make, output, tmp_path):
    async def work():
        return output()

    executor = make(FakeTool(work), recorder=Recorder(tmp_path / "calls.sqlite"), cache=ResultCache(tmp_path / "c.db"))
    result = await executor.execute(call("fake"), book(), KEY)
    assert (result.error, result.image) == (ErrorKind.BACKEND_ERROR, None)


@pytest.mark.parametrize("mode", ["CMYK", "F", "LAB", "P", "RGBA", "I;16"])
async def test_pictures_of_any_mode_come_as_rgb(make, mode, tmp_path):
    async def work():
        return ToolOutput(image=Image.new(mode, (5, 4)))

    executor = make(FakeTool(work), recorder=Recorder(tmp_path / "calls.sqlite"), cache=ResultCache(tmp_path / "c.db"))
    result = await executor.execute(call("fake"), book(), KEY)
    assert (result.error, result.image.mode, result.image.size) == (None, "RGB", (5, 4))


class Taking(FakeTool):
    """Takes its argument out of what it is given, and fails the first time."""

    async def run(self, arguments, images):
        query = arguments.pop("q")
        self.runs += 1
        if self.runs == 1:
            raise ToolError(ErrorKind.TIMEOUT, "Slow.")
        return ToolOutput(text=query)


async def test_a_tool_that_changes_its_arguments_changes_no_try_and_no_recording(make, tmp_path):
    path = tmp_path / "calls.sqlite"
    policy = BackendPolicy(retries=1, backoff_s=0.01)
    executor = make(Taking(q={"type": "string"}), backends={"fakes": policy}, recorder=Recorder(path))
    assert (await executor.execute(call("fake", q="x"), book(), KEY)).text == "x"
    replay = ToolExecutor.replaying(path)
    assert (await replay.execute(call("fake", q="x"), book(), KEY)).text == "x"
    await replay.aclose()


@pytest.mark.parametrize("kind", ["oops", None, 3])
async def test_an_error_of_no_kind_is_the_backends(make, kind):
    result = await make(raising(ToolError(kind, "Hm."))).execute(call("fake"), book(), KEY)
    assert (result.error, result.text) == (ErrorKind.BACKEND_ERROR, "Error: backend_error. Hm.")


@pytest.mark.parametrize("wait", ["5", float("nan"), float("inf"), -1, True])
async def test_a_wait_that_no_clock_has_is_left_out(make, wait):
    tool = raising(ToolError(ErrorKind.RATE_LIMITED, "Hm.", retry_after_s=wait))
    executor = make(tool, backends={"fakes": BackendPolicy(retries=1, backoff_s=0.01)})
    assert (await executor.execute(call("fake"), book(), KEY)).error is ErrorKind.RATE_LIMITED
    assert tool.runs == 2


class Closing(FakeTool):
    """Takes a while to close, and may not run meanwhile."""

    closing = False

    async def run(self, arguments, images):
        assert not self.closing
        return await super().run(arguments, images)

    async def aclose(self):
        self.closing = True
        await asyncio.sleep(0.3)
        self.closing = False


async def test_a_call_made_while_the_tools_close_waits_for_them(make):
    executor = make(Closing())
    await executor.execute(call("fake"), book(), KEY)
    closing = asyncio.create_task(executor.aclose())
    await asyncio.sleep(0.1)
    assert (await executor.execute(call("fake"), book(), KEY)).error is None
    await closing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backends": {"fakes": {"retries": 1}}}, "give a BackendPolicy"),
        ({"backends": {"fakes": None}}, "give a BackendPolicy"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
        ({"max_concurrency": 1.5}, "max_concurrency is 1.5"),
    ],
)
def test_settings_of_another_type_are_refused_at_once(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ToolExecutor([FakeTool()], **options)
