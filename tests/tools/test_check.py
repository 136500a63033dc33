import asyncio

import pytest

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools import LocalTool, ToolOutput
from opensearch_lightning.tools.check import Check, Status, check_tools, render
from opensearch_lightning.tools.schemas import CROP
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import FakeTool


class Probed(FakeTool):
    def __init__(self, **probes):
        super().__init__()
        self._probes = probes
        self.closed = False

    def probes(self):
        return self._probes

    async def aclose(self):
        self.closed = True


def probe(seconds=0.0, error=None):
    async def attempt():
        await asyncio.sleep(seconds)
        if error is not None:
            raise error

    return attempt


async def test_each_service_is_tried_and_told():
    tool = Probed(
        good=probe(),
        slow=probe(0.3),
        silent=probe(30),
        down=probe(error=ToolError(ErrorKind.UNREACHABLE, "It cannot\nbe reached.")),
        refused=probe(error=ToolError(ErrorKind.BACKEND_ERROR, "It refused the key.")),
        broken=probe(error=RuntimeError("oh")),
    )
    checks = {check.service: check for check in await check_tools([tool], timeout_s=2, slow_s=0.2)}
    assert {service: check.status for service, check in checks.items()} == {
        "good": Status.WORKS,
        "slow": Status.SLOW,
        "silent": Status.UNREACHABLE,
        "down": Status.UNREACHABLE,
        "refused": Status.FAILED,
        "broken": Status.FAILED,
    }
    assert checks["down"].detail == "unreachable: It cannot be reached."
    assert checks["silent"].detail == "no answer in 2 s"
    assert checks["broken"].detail == "RuntimeError: oh"
    assert checks["slow"].seconds >= 0.3
    assert tool.closed


async def test_a_tool_without_tries_is_called_by_a_sample():
    asked = []

    def work(arguments, images):
        asked.append((dict(arguments), len(images)))
        return ToolOutput(text="done")

    crop = LocalTool(name="crop", backend="image_processing", schema=CROP, function=work, backend_limit=1)
    (check,) = await check_tools([crop])
    assert (check.tool, check.service, check.status) == ("crop", "image_processing", Status.WORKS)
    assert asked == [({"image": "img_1", "x": 10, "y": 10, "width": 50, "height": 50}, 1)]


async def test_an_unknown_tool_without_tries_is_not_tried():
    tool = FakeTool()
    (check,) = await check_tools([tool])
    assert (check.status, tool.runs) == (Status.NOT_TRIED, 0)


def test_the_table_is_one_try_a_line():
    checks = [
        Check(tool="text_search", service="Serper", status=Status.WORKS, seconds=0.123),
        Check(tool="crop", service="image_processing", status=Status.FAILED, seconds=2.0, detail="why"),
    ]
    assert render(checks).splitlines() == [
        "tool         service           status  seconds  detail",
        "text_search  Serper            works   0.12",
        "crop         image_processing  failed  2.00     why",
    ]


@pytest.mark.parametrize("status", Status)
def test_what_is_broken(status):
    is_broken = status in ("missing key", "unreachable", "failed")
    assert Check(tool="a", service="b", status=status).is_broken == is_broken


class Odd(Probed):
    def __init__(self, probes, name):
        super().__init__()
        self.name = self.backend = name
        self._made = probes

    def probes(self):
        return self._made()


async def test_one_bad_tool_hides_no_other():
    def broken():
        raise RuntimeError("no probes today")

    async def ending():
        raise SystemExit(3)

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                return

    tools = [
        Odd(broken, "raises"),
        Odd(lambda: None, "none"),
        Odd(lambda: {"ending": ending}, "ending"),
        Odd(lambda: {"stubborn": stubborn}, "stubborn"),
        Odd(lambda: {"good": probe()}, "good"),
    ]
    async with asyncio.timeout(10):
        checks = {check.tool: check for check in await check_tools(tools, timeout_s=0.3)}
    assert {name: check.status for name, check in checks.items()} == {
        "raises": Status.FAILED,
        "none": Status.FAILED,
        "ending": Status.FAILED,
        "stubborn": Status.UNREACHABLE,
        "good": Status.WORKS,
    }
    assert "no probes today" in checks["raises"].detail


async def test_the_tools_of_one_server_are_tried_once():
    tries = []

    async def attempt():
        tries.append(1)

    tools = [Odd(lambda: {"server": attempt}, "a"), Odd(lambda: {"server": attempt}, "b")]
    tools[1].backend = "a"
    assert [check.tool for check in await check_tools(tools)] == ["a"]
    assert len(tries) == 1
