"""Public addresses of a task's images: from its metadata to the tools, and what becomes of metadata that do not fit."""

import asyncio
import io

import pytest
from PIL import Image

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.errors import DataError
from opensearch_lightning.models import load_processor
from opensearch_lightning.rollout import AgentLoop, SamplingParams
from opensearch_lightning.tools import ToolExecutor, ToolOutput
from opensearch_lightning.types import Task
from tests.scripted_engine import ScriptedEngine

CALL = '<think>look</think>\n<tool_call>\n{"name": "addresses", "arguments": {}}\n</tool_call>'
ANSWER = "<think>so</think>\n<response>Lyon</response>"
URL = "https://pictures.example.org/1.png"


class Addresses:
    """Says what the tools know of the first two images."""

    name = backend = "addresses"
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "addresses", "description": "", "parameters": {"type": "object", "properties": {}}},
    }

    async def run(self, arguments, images):
        return ToolOutput(text=f"{images.url('img_1')} {images.url('img_2')}")


def task(**metadata):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    return Task(id="t7", question="Where?", answer="Lyon", images=(buffer.getvalue(),) * 2, metadata=metadata)


@pytest.fixture(scope="module")
def observed(tiny_model_dir):
    renderer = ChatRenderer(load_processor(tiny_model_dir))

    def run(task):
        async def go():
            executor = ToolExecutor([Addresses()])
            loop = AgentLoop(ScriptedEngine(renderer, [CALL, ANSWER]), executor, system_prompt="Search.")
            try:
                return await loop.run(task, 0, SamplingParams())
            finally:
                await executor.aclose()

        return asyncio.run(go()).steps[0].result.text

    return run


@pytest.mark.parametrize(
    ("metadata", "known"),
    [
        ({}, "None None"),
        ({"image_urls": None}, "None None"),
        ({"image_urls": [None, None]}, "None None"),
        ({"image_urls": [URL, None]}, f"{URL} None"),
        ({"image_urls": (None, "no address at all")}, "None no address at all"),
    ],
)
def test_addresses_reach_the_tools_unchecked(observed, metadata, known):
    assert observed(task(**metadata)) == known


@pytest.mark.parametrize("urls", [URL, [URL], [URL] * 3, [], [URL, 3], [[URL], None], {"img_1": URL}, 7, True])
def test_what_does_not_fit_the_images_names_the_task(observed, urls):
    with pytest.raises(DataError, match="task t7: metadata image_urls is .* 2 images: give a list"):
        observed(task(image_urls=urls))
