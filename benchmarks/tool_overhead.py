"""What a call costs besides the tool's own work, and how fast the local text search is.

    python benchmarks/tool_overhead.py

Prints one table; exits with 1 when a limit is missed: 1 ms a call for the executor, 5 ms at the 95th percentile for a
search among 50,000 passages without summaries.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from opensearch_lightning.tools import (
    CallKey,
    Document,
    ImageBook,
    LocalTool,
    Recorder,
    ResultCache,
    TextIndex,
    ToolExecutor,
    ToolOutput,
)
from opensearch_lightning.types import Action

EXECUTOR_LIMIT_MS = 1.0
SEARCH_LIMIT_MS = 5.0

SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Do nothing.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "image": {"type": "string", "format": "image-id"}},
            "required": ["q", "image"],
        },
    },
}


class CoroutineTool:
    """Answers at once, on the loop."""

    name = backend = "probe"
    schema = SCHEMA

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Nothing."""
        return ToolOutput(text="done")


def thread_tool() -> LocalTool:
    """Answers at once, from a thread."""
    answer = ToolOutput(text="done")
    return LocalTool(name="probe", backend="probe", schema=SCHEMA, function=lambda *_: answer, backend_limit=64)


async def one_after_another(executor: ToolExecutor, images: ImageBook, calls: int, *, distinct: bool) -> float:
    """Median milliseconds of a call while nothing else runs."""
    times = []
    for i in range(calls):
        action = Action(kind="tool_call", name="probe", arguments={"q": str(i if distinct else 0), "image": "img_1"})
        started = time.perf_counter()
        result = await executor.execute(action, images, CallKey(task_id="task", rollout=0, step=i))
        times.append((time.perf_counter() - started) * 1e3)
        assert result.error is None, result
    return statistics.median(times)


async def all_at_once(executor: ToolExecutor, images: ImageBook, calls: int) -> float:
    """Milliseconds a call when ``calls`` are made together."""
    actions = [Action(kind="tool_call", name="probe", arguments={"q": str(i), "image": "img_1"}) for i in range(calls)]
    started = time.perf_counter()
    results = await asyncio.gather(
        *(executor.execute(action, images, CallKey(task_id="t", rollout=i, step=0)) for i, action in enumerate(actions))
    )
    assert all(result.error is None for result in results)
    return (time.perf_counter() - started) / calls * 1e3


async def executor_costs(calls: int, folder: Path) -> list[tuple[str, float, float]]:
    """``(what, milliseconds a call, limit)`` of each way to run the executor."""
    images = ImageBook()
    images.add(Image.effect_noise((1000, 1000), 50))
    images.digest("img_1")
    setups = {
        "coroutine tool": (CoroutineTool(), {}, True),
        "tool in a thread": (thread_tool(), {}, True),
        "memory cache, new calls": (CoroutineTool(), {"cache": ResultCache()}, True),
        "memory cache, kept calls": (CoroutineTool(), {"cache": ResultCache()}, False),
        "file cache, new calls": (CoroutineTool(), {"cache": ResultCache(folder / "cache.sqlite")}, True),
        "recorder": (CoroutineTool(), {"recorder": Recorder(folder / "calls.sqlite")}, True),
    }
    rows = []
    for what, (tool, options, distinct) in setups.items():
        executor = ToolExecutor([tool], max_concurrency=2048, **options)
        await one_after_another(executor, images, 50, distinct=False)
        rows.append((what, await one_after_another(executor, images, calls, distinct=distinct), EXECUTOR_LIMIT_MS))
        if distinct:
            rows.append((f"{what}, 2048 at once", await all_at_once(executor, images, 2048), EXECUTOR_LIMIT_MS))
        await executor.aclose()
    return rows


def passages(count: int, rng: random.Random) -> list[Document]:
    """Pages of about 100 words, drawn as words are in texts: a few often, most of them seldom."""
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(30_000)]
    weights = [1 / (rank + 10) for rank in range(len(vocabulary))]
    draw = partial(rng.choices, vocabulary, weights)
    return [
        Document(id=str(i), title=" ".join(draw(k=3)), url=f"wiki/{i}", text=" ".join(draw(k=rng.randint(60, 140))))
        for i in range(count)
    ]


def search_cost(count: int, queries: int, folder: Path) -> tuple[str, float, float]:
    """95th percentile in milliseconds of searches with 2 to 8 words of a page and common ones."""
    rng = random.Random(0)
    pages = passages(count, rng)
    index = TextIndex.build(folder / "index", pages)
    times = []
    for i in range(queries + 20):
        page = rng.choice(pages)
        query = " ".join(rng.sample(page.text.split(), rng.randint(2, 8)))
        started = time.perf_counter()
        found = index.search(query, top_k=5)
        if i >= 20:
            times.append((time.perf_counter() - started) * 1e3)
        assert found
    return f"text search, {count} passages, p95", statistics.quantiles(times, n=20)[-1], SEARCH_LIMIT_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--passages", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(executor_costs(arguments.calls, Path(folder)))
        rows.append(search_cost(arguments.passages, arguments.queries, Path(folder)))
    print("| what | ms | limit | ratio |\n|---|---|---|---|")
    for what, cost, limit in rows:
        print(f"| {what} | {cost:.3f} | {limit:g} | {cost / limit:.2f} |")
    return int(any(cost > limit for _, cost, limit in rows))


if __name__ == "__main__":
    sys.exit(main())
