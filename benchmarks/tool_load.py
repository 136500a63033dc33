"""2,048 tool calls at once over failing services, against a bare client that makes the same requests.

    python benchmarks/tool_load.py

A server on loopback, in a process of its own, speaks the protocols of Serper, Jina Reader, an OpenAI-compatible model
and PaddleX with delays of seconds; one call in ten meets a fault. Four calls in ten are text searches with three pages
each, read and summarized; two each are image searches, layout parsing and crops. The executor with its real tools and
the bare client (aiohttp, and the ``openai`` package for summaries) take turns, with the same calls at the same paced
starts. Exits with 1 when a limit is missed: an answer lost, one later than its timeout allows, less than 80% of the
bare client's throughput, a caller's event loop whose longest gap (median of the waves) is more than 50 ms above that of
the bare client's, or memory that grows from wave to wave. The gaps of the loop on which tools run are told beside.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web
from PIL import Image

from opensearch_lightning.pictures import png_bytes
from opensearch_lightning.tools import BackendPolicy, CallKey, ImageBook, ToolExecutor, ToolOutput
from opensearch_lightning.tools.online.chat_summary import ChatSummarizer
from opensearch_lightning.tools.online.lens import SerperLens
from opensearch_lightning.tools.online.paddlex import PaddleXLayoutParsing
from opensearch_lightning.tools.online.page_readers import JinaReader
from opensearch_lightning.tools.online.serper import Serper
from opensearch_lightning.tools.online.web_search import WebSearch
from opensearch_lightning.tools.picture_calls import crop_tool
from opensearch_lightning.types import Action, ErrorKind

FAULTS = ("silent", "status_500", "status_429", "half", "html")
SEEN_AS = {
    "silent": ErrorKind.TIMEOUT,
    "status_500": ErrorKind.BACKEND_ERROR,
    "status_429": ErrorKind.RATE_LIMITED,
    "half": ErrorKind.BACKEND_ERROR,
    "html": ErrorKind.BACKEND_ERROR,
}
PAGES = 3
MIN_THROUGHPUT = 0.8
MAX_EXTRA_GAP_S = 0.05
MAX_GROWTH_MB = 64
SLACK_S = 1.0
BEAT_S = 0.005
KINDS = ("text_search", "text_search", "image_search", "layout_parsing", "crop")
PAGE = "The tower was built in 1889 by an engineer. " * 100


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the mix: its tool, what makes it distinct, and the fault that it meets."""

    number: int
    tool: str
    fault: str | None

    @property
    def text(self) -> str:
        """Query or address, which tells the server of the fault."""
        return f"{self.fault or 'fine'}-{self.number}"

    @property
    def picture(self) -> int:
        """Which of the pictures; its width tells the server of the fault."""
        return 0 if self.fault is None else 1 + FAULTS.index(self.fault)


def mix(count: int, fault_rate: float, seed: int) -> list[Call]:
    """Calls in the order in which they start."""
    rng = random.Random(seed)
    # Crops ask no service: the others bear their share of faults.
    rate = fault_rate * len(KINDS) / (len(KINDS) - KINDS.count("crop"))
    calls = []
    for number in range(count):
        tool = KINDS[number % len(KINDS)]
        fault = rng.choice(FAULTS) if tool != "crop" and rng.random() < rate else None
        calls.append(Call(number=number, tool=tool, fault=fault))
    return calls


def address(call: Call) -> str:
    """Public address of the picture of an image search; no name, for looking names up needs the internet."""
    return f"http://93.184.216.34/{call.text}"


def pictures() -> list[Image.Image]:
    """Pictures of 200 pixels width and one more for each fault."""
    return [Image.effect_noise((200 + i, 120), 60).convert("RGB") for i in range(1 + len(FAULTS))]


# --- the services


async def misbehave(request: web.Request, fault: str) -> web.StreamResponse:
    if fault == "silent":
        await asyncio.sleep(3600)
    if fault == "status_500":
        return web.Response(status=500)
    if fault == "status_429":
        return web.Response(status=429, headers={"Retry-After": "1"})
    if fault == "html":
        return web.Response(text="<html>busy</html>", content_type="text/html")
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"organic": [')
    assert request.transport is not None
    request.transport.close()
    return response


def serve(port: multiprocessing.Queue, delay: float) -> None:
    rng = random.Random(0)

    def service(find_fault: Callable[[Any], str], answer: Callable[[Any], Any], scale: float) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.method == "POST" else request.path
            await asyncio.sleep(scale * delay * rng.uniform(0.5, 1.5))
            fault = find_fault(body)
            return web.json_response(answer(body)) if fault == "fine" else await misbehave(request, fault)

        return handle

    def of_picture(body: Any) -> str:
        width = int.from_bytes(base64.b64decode(body["file"][:48])[16:20], "big")
        return ("fine", *FAULTS)[width - 200]

    def hits(body: Any) -> Any:
        links = [f"https://example.org/{body['q']}/{i}" for i in range(PAGES)]
        return {"organic": [{"title": "A page", "link": link, "snippet": "Of a tower."} for link in links]}

    async def run() -> None:
        app = web.Application(client_max_size=10**8)
        seen = [{"title": "A tower", "link": "https://example.org/tower", "source": "example"}] * 5
        block = {"block_label": "text", "block_content": "Read.", "block_bbox": [0, 0, 9, 9]}
        layouts = [{"prunedResult": {"parsing_res_list": [block] * 20}}]
        read = {"errorCode": 0, "errorMsg": "Success", "result": {"layoutParsingResults": layouts}}
        wrote = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "A tower. It is of 1889."}}]}
        page = {"code": 200, "data": {"title": "A page", "content": PAGE}}
        text_fault = lambda body: body.get("q", body.get("url", "")).rpartition("/")[2].partition("-")[0]  # noqa: E731
        fine = lambda body: "fine"  # noqa: E731
        app.router.add_post("/search", service(text_fault, hits, 1.0))
        app.router.add_post("/lens", service(text_fault, lambda body: {"organic": seen}, 1.0))
        app.router.add_post("/layout-parsing", service(of_picture, lambda body: read, 1.0))
        app.router.add_post("/v1/chat/completions", service(fine, lambda body: wrote, 0.5))
        app.router.add_get("/{url:.*}", service(fine, lambda body: page, 0.5))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.sleep(3600)

    asyncio.run(run())


# --- the two clients


@dataclass
class Outcome:
    """One wave: of each call its error kind or ``None`` and its seconds, the loops' gaps, seconds, CPU seconds."""

    errors: dict[int, str | None] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tool_gaps: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    answered_s: float = 0.0
    cpu_s: float = 0.0
    most_at_once: int = 0


async def wave(
    calls: Sequence[Call], starts_per_s: float, carry_out: Callable[[Call], Awaitable[str | None]]
) -> Outcome:
    """Start every call at its time and wait for all."""
    outcome, now, running = Outcome(), time.perf_counter, 0

    async def one(call: Call) -> None:
        nonlocal running
        await asyncio.sleep(call.number / starts_per_s)
        running += 1
        outcome.most_at_once = max(outcome.most_at_once, running)
        started = now()
        outcome.errors[call.number] = await carry_out(call)
        outcome.latencies.append(now() - started)
        if call.fault != "silent":
            outcome.answered_s = now() - begin
        running -= 1

    heart = asyncio.create_task(record_gaps(outcome.gaps))
    used = time.process_time()
    begin = now()
    await asyncio.gather(*map(one, calls))
    outcome.wall_s, outcome.cpu_s = now() - begin, time.process_time() - used
    heart.cancel()
    return outcome


async def record_gaps(gaps: list[float]) -> None:
    """Note by how much each of many short sleeps on this loop is too long, in seconds; never ends."""
    before = time.perf_counter()
    while True:
        await asyncio.sleep(BEAT_S)
        gaps.append(time.perf_counter() - before - BEAT_S)
        before = time.perf_counter()


class Heart:
    """A tool that never ends, and measures the loop on which tools run."""

    name = backend = "heart"
    schema: Mapping[str, Any] = {"type": "function", "function": {"name": name, "parameters": {"properties": {}}}}

    def __init__(self, gaps: list[float]) -> None:
        self._gaps = gaps

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Beat until cancelled."""
        await record_gaps(self._gaps)
        return ToolOutput()


async def with_executor(url: str, calls: Sequence[Call], options: argparse.Namespace) -> Outcome:
    os.environ["LOAD_KEY"] = "load-test-key"
    executor = ToolExecutor(
        [
            WebSearch(
                Serper(api_key_env="LOAD_KEY", base_url=url, timeout_s=options.timeout),
                JinaReader(api_key_env="LOAD_KEY", base_url=url, resolve_names=False, timeout_s=options.timeout),
                ChatSummarizer(model="model", base_url=f"{url}/v1", timeout_s=options.timeout),
                top_k=PAGES,
            ),
            SerperLens(api_key_env="LOAD_KEY", base_url=url, timeout_s=options.timeout),
            PaddleXLayoutParsing(url, timeout_s=options.timeout),
            crop_tool(),
            Heart(gaps := []),
        ],
        timeout_s=options.timeout,
        max_concurrency=len(calls) + 1,
        backends={"heart": BackendPolicy(timeout_s=1e6)},
    )
    beat = Action(kind="tool_call", name="heart", arguments={}, well_formed=True)
    heart = asyncio.create_task(executor.execute(beat, ImageBook(), CallKey(task_id="heart", rollout=0, step=0)))
    shown = pictures()
    # A rollout has its pictures before it calls.
    books = [ImageBook() for _ in calls]
    for call, images in zip(calls, books, strict=True):
        images.add(shown[call.picture], url=address(call))

    async def carry_out(call: Call) -> str | None:
        arguments: dict[str, Any] = {
            "text_search": {"q": call.text},
            "image_search": {"url": "img_1"},
            "layout_parsing": {"image": "img_1"},
            "crop": {"image": "img_1", "x": 10, "y": 10, "width": 100, "height": 50},
        }[call.tool]
        action = Action(kind="tool_call", name=call.tool, arguments=arguments, well_formed=True)
        key = CallKey(task_id="task", rollout=call.number, step=0)
        return (await executor.execute(action, books[call.number], key)).error

    try:
        outcome = await wave(calls, options.starts_per_s, carry_out)
        outcome.tool_gaps = gaps
        return outcome
    finally:
        heart.cancel()
        await executor.aclose()


async def with_bare_client(url: str, calls: Sequence[Call], options: argparse.Namespace) -> Outcome:
    shown = pictures()
    key = {"X-API-KEY": "load-test-key"}
    bearer = {"Authorization": "Bearer load-test-key", "Accept": "application/json"}

    model = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=openai.DefaultAioHttpClient(timeout=None)
    )
    async with model, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(method: str, path: str, **request: Any) -> Any:
            async with session.request(method, url + path, **request) as response:
                response.raise_for_status()
                return json.loads(await response.read())

        async def read(hit: Mapping[str, Any], query: str) -> str:
            page = await ask("GET", f"/{hit['link']}", headers=bearer)
            messages = [{"role": "user", "content": f"{query}\n{page['data']['content']}"}]
            if options.bare_chat == "aiohttp":
                said = await ask("POST", "/v1/chat/completions", json={"model": "model", "messages": messages})
                return str(said["choices"][0]["message"]["content"])
            written = await model.chat.completions.create(model="model", messages=messages)
            return str(written.choices[0].message.content)

        async def make(call: Call) -> None:
            image = shown[call.picture]
            if call.tool == "text_search":
                found = await ask("POST", "/search", json={"q": call.text, "hl": "en", "num": PAGES}, headers=key)
                await asyncio.gather(*(read(hit, call.text) for hit in found["organic"]))
            elif call.tool == "image_search":
                await ask("POST", "/lens", json={"url": address(call)}, headers=key)
            elif call.tool == "layout_parsing":
                file = base64.b64encode(await asyncio.to_thread(png_bytes, image)).decode()
                await ask("POST", "/layout-parsing", json={"file": file, "fileType": 1, "visualize": False})
            else:
                await asyncio.to_thread(image.crop, (10, 10, 110, 60))

        async def carry_out(call: Call) -> str | None:
            try:
                async with asyncio.timeout(options.timeout):
                    await make(call)
            except TimeoutError:
                return ErrorKind.TIMEOUT
            except (aiohttp.ClientError, ValueError) as error:
                limited = isinstance(error, aiohttp.ClientResponseError) and error.status == 429
                return ErrorKind.RATE_LIMITED if limited else ErrorKind.BACKEND_ERROR
            return None

        return await wave(calls, options.starts_per_s, carry_out)


# --- the verdict


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def problems(
    calls: Sequence[Call], bare: Sequence[Outcome], ours: Sequence[Outcome], memory: Sequence[float], timeout_s: float
) -> list[str]:
    found = []
    for outcome in ours:
        lost = [call for call in calls if call.number not in outcome.errors]
        wrong = [c for c in calls if outcome.errors.get(c.number) != (SEEN_AS[c.fault] if c.fault else None)]
        if lost or wrong:
            told = Counter(f"{call.tool} {call.fault} seen as {outcome.errors.get(call.number)}" for call in wrong)
            found.append(f"{len(lost)} calls lost, {len(wrong)} with another outcome than their fault's: {dict(told)}")
        if (latest := max(outcome.latencies)) > timeout_s + SLACK_S:
            found.append(f"a call took {latest:.2f} s, its timeout is {timeout_s:g} s")
    ratio = throughput(ours) / throughput(bare)
    if ratio < MIN_THROUGHPUT:
        found.append(f"throughput is {ratio:.2f} of the bare client's, at least {MIN_THROUGHPUT} is asked")
    gap, bare_gap = (statistics.median(max(outcome.gaps) for outcome in outcomes) for outcomes in (ours, bare))
    if gap > bare_gap + MAX_EXTRA_GAP_S:
        found.append(f"the event loop stood still for {gap:.3f} s, the bare client's for {bare_gap:.3f} s")
    if memory[-1] - memory[0] > MAX_GROWTH_MB:
        found.append(f"memory grew from {memory[0]:.0f} to {memory[-1]:.0f} MB between waves")
    return found


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Answered calls a second until the last answer: the silent ones end by timeout in either client."""
    return sum(len(outcome.errors) for outcome in outcomes) / sum(outcome.answered_s for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2048)
    parser.add_argument("--waves", type=int, default=3, help="of each client, in turns")
    parser.add_argument("--faults", type=float, default=0.1)
    parser.add_argument("--starts-per-s", type=float, default=512)
    parser.add_argument("--delay", type=float, default=8.0, help="mean seconds of a service's answer")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument(
        "--bare-chat", choices=["openai", "aiohttp"], default="openai", help="its library for summaries"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Each call has a connection, and so has each page.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    calls = mix(options.calls, options.faults, options.seed)
    spawn = multiprocessing.get_context("spawn")
    port: Any = spawn.Queue()
    server = spawn.Process(target=serve, args=(port, options.delay), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port.get(timeout=60)}"
    clients = {"bare client": with_bare_client, "executor": with_executor}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in clients}
    memory = []
    # The first calls import what is imported late.
    for client in clients.values():
        asyncio.run(client(url, calls[: len(KINDS)], options))
    heads = [
        "client",
        "wave",
        "answered/s",
        "wall s",
        "CPU s",
        "at once",
        "longest gap ms",
        "its p99",
        "tools' loop ms",
    ]
    heads += ["errors", "memory MB"]
    # Most of the longest gaps are the garbage collector's: of the calls, not of all that was imported.
    gc.collect()
    gc.freeze()
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for number in range(options.waves):
        for name, client in clients.items():
            outcome = asyncio.run(client(url, calls, options))
            outcomes[name].append(outcome)
            errors = sum(error is not None for error in outcome.errors.values())
            p99 = statistics.quantiles(outcome.gaps, n=100)[-1]
            figures = [throughput([outcome]), outcome.wall_s, outcome.cpu_s, outcome.most_at_once]
            figures += [max(outcome.gaps) * 1e3, p99 * 1e3, max(outcome.tool_gaps, default=0.0) * 1e3, errors, rss_mb()]
            print(f"| {name} | {number + 1} | {' | '.join(f'{figure:.0f}' for figure in figures)} |", flush=True)
        memory.append(rss_mb())
    server.terminate()
    faulty = sum(call.fault is not None for call in calls)
    print(f"\n{len(calls)} calls, {faulty} with a fault; throughput {throughput(outcomes['executor']):.0f} a second, ")
    print(f"{throughput(outcomes['executor']) / throughput(outcomes['bare client']):.2f} of the bare client's")
    found = problems(calls, outcomes["bare client"], outcomes["executor"], memory, options.timeout)
    print("\n".join(["MISSED:", *found]) if found else "all limits kept")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
