"""Pictures, ShareGPT rows and tasks for the tests of data."""

import functools
import io
from pathlib import Path
from typing import Any

from PIL import Image

from opensearch_lightning.data import write_rl_shards, write_sft_shards
from opensearch_lightning.types import Task

SYSTEM = "You answer questions about pictures."


@functools.cache
def picture(shade: int = 0, side: int = 32) -> bytes:
    """A grey PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (shade % 256, 0, 0)).save(buffer, format="PNG")
    return buffer.getvalue()


def call(query: str) -> str:
    """A policy turn that searches."""
    arguments = f'{{"name": "text_search", "arguments": {{"q": "{query}"}}}}'
    return f"<think>I look it up.</think>\n<tool_call>\n{arguments}\n</tool_call>"


def answer(text: str) -> str:
    """A policy turn that answers."""
    return f"<think>Found.</think>\n<response>{text}</response>"


def conversation(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """Turns as ShareGPT has them."""
    return [{"from": speaker, "value": text} for speaker, text in turns]


def row(number: int, *, words: int = 3, tools: Any = "", **fields: Any) -> dict[str, Any]:
    """A usable row; ``words`` sets its length."""
    return {
        "id": f"row-{number}",
        "conversations": conversation(
            ("human", "<image>Which town is it?"),
            ("gpt", call(f"town {number}")),
            ("observation", "1. Town: " + "lies " * words),
            ("gpt", answer(f"town {number}")),
        ),
        "images": [picture(number)],
        "system": SYSTEM,
        "tools": tools,
        **fields,
    }


def sft_shards(folder: Path, n_rows: int = 12, **options: Any) -> Path:
    """Shards of rows of growing length."""
    write_sft_shards([row(i, words=1 + 3 * (i * 7 % n_rows)) for i in range(n_rows)], folder, **options)
    return folder


def task(number: int, *, question: str = "Which town is it?") -> Task:
    """A task with one picture."""
    return Task(
        id=f"task-{number}",
        question=question,
        answer=f"town {number}",
        aliases=(f"Town No. {number}",),
        images=(picture(number),),
        metadata={"hops": number % 3, "path": ["a", "b"]},
    )


def rl_shards(folder: Path, n_tasks: int = 10) -> Path:
    """Shards of tasks."""
    write_rl_shards(map(task, range(n_tasks)), folder)
    return folder
