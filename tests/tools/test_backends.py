"""Limits, retries and the circuit breaker of a backend, through the executor."""

import asyncio
import time

import pytest

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import BackendPolicy, ToolExecutor, ToolOutput
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, FakeTool, book, call


class Backend:
    """A tool that fails as told, one error a run, then succeeds; notes when it was called."""

    def __init__(self, *errors, seconds=0.0, name="fake", backend="fakes"):
        self.errors = list(errors)
        self.seconds = seconds
        self.starts = []
        self.tool = FakeTool(self._work, name=name, backend=backend)

    async def _work(self):
        self.starts.append(time.monotonic())
        await asyncio.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        return ToolOutput(text="done")


def down(kind=ErrorKind.UNREACHABLE, **options):
    return ToolError(kind, "down", **options)


@pytest.fixture
async def make():
    made = []

    def build(*tools, timeout_s=5.0, max_concurrency=64, **policy):
        backends = {"fakes": BackendPolicy(**policy)}
        made.append(ToolExecutor(tools, timeout_s=timeout_s, max_concurrency=max_concurrency, backends=backends))
        return made[-1]

    yield build
    for executor in made:
        await executor.aclose()


async def run(executor, name="fake"):
    return await executor.execute(call(name), book(), KEY)


async def test_errors_of_the_infrastructure_are_tried_again(make):
    backend = Backend(down(), RuntimeError("half a body"))
    result = await run(make(backend.tool, retries=2, backoff_s=0.02))
    assert (result.error, result.text) == (None, "done")
    assert len(backend.starts) == 3


async def test_the_last_error_counts_when_retries_are_used_up(make):
    backend = Backend(down(), down(ErrorKind.BACKEND_ERROR), down())
    result = await run(make(backend.tool, retries=1, backoff_s=0.01))
    assert result.error is ErrorKind.BACKEND_ERROR
    assert len(backend.starts) == 2


async def test_the_policys_own_errors_are_not_tried_again(make):
    backend = Backend(down(ErrorKind.INVALID_ARGUMENT))
    result = await run(make(backend.tool, retries=3, backoff_s=0.01))
    assert result.error is ErrorKind.INVALID_ARGUMENT
    assert len(backend.starts) == 1


async def test_waits_double_and_vary(make):
    backend = Backend(down(), down(), down())
    await run(make(backend.tool, retries=3, backoff_s=0.05))
    waits = [later - start for start, later in zip(backend.starts, backend.starts[1:], strict=False)]
    for wait, mean in zip(waits, (0.05, 0.1, 0.2), strict=True):
        assert 0.5 * mean <= wait < 1.5 * mean + 0.2


async def test_retry_after_is_honoured(make):
    backend = Backend(down(ErrorKind.RATE_LIMITED, retry_after_s=0.4))
    result = await run(make(backend.tool, retries=1, backoff_s=0.01))
    assert result.error is None
    assert backend.starts[1] - backend.starts[0] >= 0.4


async def test_no_wait_for_a_retry_that_comes_too_late(make):
    backend = Backend(down(ErrorKind.RATE_LIMITED, retry_after_s=60.0))
    result = await run(make(backend.tool, retries=1, timeout_s=2.0))
    assert result.error is ErrorKind.RATE_LIMITED
    assert result.latency_s < 1.0


async def test_retries_stay_within_the_time_of_the_call(make):
    backend = Backend(*[down()] * 9, seconds=0.15)
    started = time.monotonic()
    result = await run(make(backend.tool, retries=9, backoff_s=0.01, timeout_s=0.4))
    assert 0.3 < time.monotonic() - started < 0.8
    assert result.error in (ErrorKind.TIMEOUT, ErrorKind.UNREACHABLE)
    assert 2 <= len(backend.starts) <= 3


async def test_a_backend_may_have_a_timeout_of_its_own():
    slow, other = Backend(seconds=0.5), Backend(seconds=0.5, name="other", backend="others")
    executor = ToolExecutor([slow.tool, other.tool], backends={"fakes": BackendPolicy(timeout_s=0.1)})
    results = await asyncio.gather(run(executor), run(executor, "other"))
    await executor.aclose()
    assert [result.error for result in results] == [ErrorKind.TIMEOUT, None]


async def test_starts_are_spaced(make):
    backend = Backend()
    executor = make(backend.tool, calls_per_s=20.0)
    await asyncio.gather(*(run(executor) for _ in range(5)))
    gaps = [later - start for start, later in zip(backend.starts, backend.starts[1:], strict=False)]
    assert all(gap > 0.04 for gap in gaps)


async def test_a_backend_that_is_waited_for_holds_up_no_other(make):
    backend, quick = Backend(), Backend(name="quick", backend="others")
    executor = make(backend.tool, quick.tool, max_concurrency=1, calls_per_s=2.0)
    crowd = [asyncio.create_task(run(executor)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert (await run(executor, "quick")).latency_s < 0.3
    await asyncio.gather(*crowd)


async def test_a_backend_has_turns_of_its_own():
    backend = Backend(seconds=0.05)
    executor = ToolExecutor([backend.tool], backends={"fakes": BackendPolicy(max_concurrency=2)})
    await asyncio.gather(*(run(executor) for _ in range(6)))
    await executor.aclose()
    assert backend.tool.most_running == 2


async def test_the_breaker_spares_a_backend_that_is_down_and_one_call_tries(make):
    backend = Backend(down(), down(), seconds=0.05)
    executor = make(backend.tool, breaker_failures=2, breaker_s=0.5)
    assert [(await run(executor)).error for _ in range(2)] == [ErrorKind.UNREACHABLE] * 2
    spared = await run(executor)
    assert (spared.error, len(backend.starts)) == (ErrorKind.UNREACHABLE, 2)
    assert "several times in a row" in spared.text
    await asyncio.sleep(0.6)
    results = await asyncio.gather(*(run(executor) for _ in range(4)))
    assert sorted(result.error is None for result in results) == [False, False, False, True]
    assert len(backend.starts) == 3
    assert (await run(executor)).error is None


async def test_the_breaker_stays_open_when_the_trial_fails(make):
    backend = Backend(down(), down())
    executor = make(backend.tool, breaker_failures=1, breaker_s=0.2)
    await run(executor)
    await asyncio.sleep(0.25)
    assert (await run(executor)).error is ErrorKind.UNREACHABLE
    assert len(backend.starts) == 2
    assert (await run(executor)).error is ErrorKind.UNREACHABLE
    assert len(backend.starts) == 2


@pytest.mark.parametrize("kind", [ErrorKind.RATE_LIMITED, ErrorKind.INVALID_ARGUMENT])
async def test_a_backend_that_answers_is_not_down(make, kind):
    backend = Backend(down(kind), down(kind))
    executor = make(backend.tool, breaker_failures=1)
    results = [await run(executor) for _ in range(3)]
    assert [result.error for result in results] == [kind, kind, None]


async def test_cancelling_the_trial_lets_another_one_try(make):
    backend = Backend(down())
    executor = make(backend.tool, breaker_failures=1, breaker_s=0.05)
    await run(executor)
    await asyncio.sleep(0.1)
    backend.seconds = 30
    trial = asyncio.create_task(run(executor))
    await asyncio.sleep(0.1)
    trial.cancel()
    await asyncio.wait([trial])
    backend.seconds = 0
    await asyncio.sleep(0.1)
    assert (await run(executor)).error is None


async def test_cancelling_a_wait_frees_everything(make):
    backend = Backend(down(), name="fake")
    executor = make(backend.tool, retries=1, backoff_s=30.0, timeout_s=100.0, max_concurrency=1)
    waiting = asyncio.create_task(run(executor))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (await asyncio.wait_for(run(executor), 2)).error is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timeout_s": 0.0}, "timeout_s of a backend is 0.0: set a number above 0"),
        ({"calls_per_s": -1.0}, "calls_per_s of a backend is -1.0"),
        ({"breaker_s": float("inf")}, "breaker_s of a backend is inf"),
        ({"retries": -1}, "retries of a backend is -1: set 0 or more"),
        ({"breaker_failures": 0}, "breaker_failures of a backend is 0: set 1 or more"),
        ({"max_concurrency": 0}, "max_concurrency of a backend is 0: set 1 or more"),
    ],
)
def test_policies_that_cannot_be_are_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        BackendPolicy(**values)


def test_a_policy_for_no_tools_backend_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"Policies of \['serper'\], which no tool has: choose from \['fakes'\]"
    ):
        ToolExecutor([FakeTool()], backends={"serper": BackendPolicy()})


@pytest.mark.parametrize(
    "settings",
    [
        {"retries": 1.5},
        {"retries": True},
        {"max_concurrency": 1.5},
        {"breaker_failures": float("nan")},
        {"backoff_s": None},
        {"timeout_s": "5"},
    ],
)
def test_values_of_another_type_are_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigurationError, match=f"{name} of a backend is"):
        BackendPolicy(**settings)
