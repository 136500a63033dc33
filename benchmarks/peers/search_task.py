"""A small search task for comparing trainers: what is asked, and the two tools.

Every task is solved by the same script: zoom into the picture, search the town, search its river, answer. What differs
between tasks is copied from observations.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import io
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from transformers.utils import get_json_schema

from opensearch_lightning.types import Task

SYSTEM_PROMPT = (
    "You are an agent that answers questions about a picture. Think in <think></think>, then either call one tool in "
    "<tool_call></tool_call> or give the short answer in <response></response>. Look at the picture closely before "
    "you search, search for one thing at a time, and rely on what the pages say rather than on what you remember."
)
TURNS = 4
SIDE = 96
ZOOMED_SIDE = 64
_SYLLABLES = "bel cor dan el fir gam hol in jor kel lum mor nor os pel quin ras sel tor ul ven wen yar zim".split()


@dataclass(frozen=True, kw_only=True)
class Town:
    """What a task asks about."""

    name: str
    river: str
    source: str
    inhabitants: int


class Tools:
    """The two tools as functions with docstrings, which is what either trainer makes its schemas of.

    ``seconds`` is how long each call takes besides, and may be set between steps.
    """

    def __init__(self, towns: list[Town], *, coroutines: bool = False) -> None:
        self.seconds = 0.0
        self.coroutines = coroutines
        self._pages = {town.name: _town_page(town) for town in towns}
        self._pages |= {town.river: _river_page(town) for town in towns}

    def page(self, query: str) -> str:
        """The page of the name most like the query: a rollout that copies a name wrongly goes on as it was taught."""
        return self._pages[difflib.get_close_matches(str(query), self._pages, n=1, cutoff=0.0)[0]]

    def functions(self) -> list[Callable[..., Any]]:
        """``zoom`` and ``search``, blocking or coroutines; they return what the policy is to see."""

        def zoom(image: str, x: int, y: int, width: int, height: int) -> list[dict[str, Any]]:
            """
            Cut a part out of a picture and enlarge it.

            Args:
                image: Name of the picture, such as img_1.
                x: Left edge of the part, in pixels.
                y: Upper edge of the part, in pixels.
                width: Width of the part, in pixels.
                height: Height of the part, in pixels.
            """
            return zoomed_blocks()

        def search(query: str) -> str:
            """
            Search the encyclopedia and return the best page.

            Args:
                query: Name of the town or river to look for.
            """
            return self.page(query)

        return [self._timed(zoom), self._timed(search)]

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools."""
        return [get_json_schema(function) for function in self.functions()]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def blocking(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.seconds)
            return function(*args, **kwargs)

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(self.seconds)
            return function(*args, **kwargs)

        chosen: Callable[..., Any | Awaitable[Any]] = coroutine if self.coroutines else blocking
        # without __wrapped__, behind which inspection would find the blocking function
        for name in ("__name__", "__qualname__", "__doc__", "__annotations__"):
            setattr(chosen, name, getattr(function, name))
        chosen.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
        return chosen


def make_towns(count: int, seed: int = 0) -> list[Town]:
    """``count`` towns with names of their own."""
    rng = random.Random(seed)
    names = [f"{a}{b}".capitalize() for a in _SYLLABLES for b in _SYLLABLES if a != b]
    rng.shuffle(names)
    return [
        Town(name=names[3 * i], river=names[3 * i + 1], source=names[3 * i + 2], inhabitants=rng.randrange(100, 999))
        for i in range(count)
    ]


def _town_page(town: Town) -> str:
    return (
        f"{town.name} is a town of {town.inhabitants} inhabitants in the northern hills. It lies on both banks of the "
        f"river {town.river}, over which three old bridges lead, and is known for its market and its mills."
    )


def _river_page(town: Town) -> str:
    return (
        f"The {town.river} is a river of the northern hills. It springs at the mountain {town.source}, runs through "
        "woods and meadows to the south, and takes up two smaller rivers before it reaches the sea."
    )


def picture(number: int, side: int = SIDE) -> Image.Image:
    """A picture of coloured noise."""
    colour = random.Random(number).choices(range(256), k=3)
    noise = Image.effect_noise((side, side), 40).convert("RGB")
    return Image.blend(noise, Image.new("RGB", noise.size, tuple(colour)), 0.5)


_ZOOMED = Image.new("RGB", (ZOOMED_SIDE, ZOOMED_SIDE), (180, 120, 60))
ZOOM_TEXT = "The part was enlarged."


def zoomed_picture() -> Image.Image:
    """What ``zoom`` shows."""
    return _ZOOMED


def zoomed_blocks() -> list[dict[str, Any]]:
    """What ``zoom`` returns where a tool returns content blocks; the text is that of this package's executor."""
    text = f"img_2: {ZOOMED_SIDE}x{ZOOMED_SIDE} pixels. {ZOOM_TEXT}"
    return [{"type": "text", "text": text}, {"type": "image", "image": zoomed_picture()}]


def make_tasks(towns: list[Town]) -> list[Task]:
    """One task a town."""
    tasks = []
    for number, town in enumerate(towns):
        buffer = io.BytesIO()
        picture(number).save(buffer, "PNG")
        tasks.append(
            Task(
                id=f"task-{number:03d}",
                question=f"The picture shows {town.name}. At which mountain does the river of this town spring?",
                answer=town.source,
                images=(buffer.getvalue(),),
            )
        )
    return tasks
