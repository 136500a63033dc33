import asyncio
from types import SimpleNamespace

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import (
    Document,
    ImageBook,
    ImageIndex,
    ResultCache,
    TextIndex,
    ToolExecutor,
    offline_tools,
)
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, call
from tests.tools.pictures import askew, emblem, sign

NAMES = [
    "text_search",
    "image_search",
    "layout_parsing",
    "crop",
    "sharpen",
    "super_resolution",
    "perspective_correct",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    pages = [
        Document(id="1", title="Lindal", url="wiki/Lindal", text="Lindal is a port. Its mayor is Ada Quill."),
        Document(id="2", title="Torvik", url="wiki/Torvik", text="Torvik is a city. Its mayor is Bo Renn."),
    ]
    pictures = [("1", "Lindal", "wiki/Lindal", emblem(1)), ("2", "Torvik", "wiki/Torvik", emblem(2))]
    return SimpleNamespace(
        text_index=TextIndex.build(root / "text", pages), image_index=ImageIndex.build(root / "images", pictures)
    )


@pytest.fixture(scope="module")
def tools(world):
    return offline_tools(world)


@pytest.fixture
def images():
    images = ImageBook()
    for picture in (emblem(1), sign("Port of Lindal"), askew(sign("Torvik Gate"), 0.3), Image.new("RGB", (100, 80))):
        images.add(picture)
    return images


async def execute(tools, images, *actions, **options):
    executor = ToolExecutor(tools, **options)
    try:
        return [await executor.execute(action, images, KEY) for action in actions]
    finally:
        await executor.aclose()


async def test_all_seven_through_the_executor(tools, images):
    results = await execute(
        tools,
        images,
        call("web_search", query="mayor of Torvik", top_k=1),
        call("image_search", image="img_1"),
        call("layout_parsing", image="img_2"),
        call("crop", image="img_4", x=90, y=70, width=50, height=50),
        call("sharpen", image="img_1"),
        call("super_resolution", image="img_1", scale=2),
        call("perspective_correct", image="img_3"),
        timeout_s=60,
    )
    assert [(result.tool, result.error) for result in results] == [(name, None) for name in NAMES]
    assert [result.text for result in results[:6]] == [
        "1. Torvik (wiki/Torvik): Its mayor is Bo Renn.",
        "1. Lindal (wiki/Lindal)",
        "Port of Lindal",
        "img_5: 10x10 pixels. Box clipped to the image of 100x80 pixels.",
        "img_5: 96x96 pixels.",
        "img_5: 192x192 pixels. Enlarged 2x by Lanczos and mild sharpening.",
    ]
    assert [result.hits for result in results] == [1, 1, None, None, None, None, None]
    assert results[6].text.endswith("pixels. Perspective corrected.")
    assert all(result.image.mode == "RGB" for result in results[3:])


async def test_fallback_and_success_read_differently(tools, images):
    fallback, success = await execute(
        tools, images, call("perspective_correct", image="img_4"), call("perspective_correct", image="img_3")
    )
    assert fallback.text == "img_5: 100x80 pixels. No reliable quadrilateral found: the image is unchanged."
    assert (fallback.note is None, success.note is None) == (False, True)


async def test_nothing_found(tools, images):
    results = await execute(
        tools, images, call("text_search", q="unheardof"), call("image_search", url="img_2"), timeout_s=60
    )
    assert [(result.text, result.hits, result.error) for result in results] == [("No results.", 0, None)] * 2


async def test_crop_outside(tools, images):
    (result,) = await execute(tools, images, call("crop", image="img_4", x=500, y=500, width=50, height=50))
    assert result.error is ErrorKind.INVALID_ARGUMENT
    assert result.text == "Error: invalid_argument. The box 500,500,50,50 lies outside the image of 100x80 pixels."


async def test_boxes_may_be_relative(world, images):
    (tool,) = offline_tools(world, names=["crop"], coordinates="relative_1000")
    function = tool.schema["function"]
    assert "thousandths" in function["description"]
    assert "pixels" not in function["description"]
    assert "pixels of that image" in offline_tools(world, names=["crop"])[0].schema["function"]["description"]
    cut, clipped, outside, beyond = await execute(
        [tool],
        images,
        call("crop", image="img_4", x=500, y=250, width=300, height=500),
        call("crop", image="img_4", x=900, y=0, width=500, height=1000),
        call("crop", image="img_4", x=1000, y=0, width=100, height=1000),
        call("crop", image="img_4", x=1001, y=0, width=100, height=1000),
    )
    assert cut.text == "img_5: 30x40 pixels."
    assert clipped.text == "img_5: 10x80 pixels. Box clipped to the image, which spans 0 to 1000 both ways."
    assert outside.text == (
        "Error: invalid_argument. The box 1000,0,100,1000 lies outside the image, which spans 0 to 1000 both ways."
    )
    assert beyond.text == "Error: invalid_argument. x must be at most 1000, not 1001."
    with pytest.raises(ConfigurationError, match=r"coordinates is 'percent': set one of \['pixels', 'relative_1000'\]"):
        offline_tools(world, coordinates="percent")


async def test_results_do_not_name_images(tools):
    """They may come from a cache, where the picture had another name."""
    images = ImageBook()
    for _ in range(2):
        images.add(emblem(1))
    one, other = await execute(
        tools,
        images,
        call("crop", image="img_1", x=50, y=50, width=90, height=90),
        call("crop", image="img_2", x=50, y=50, width=90, height=90),
        cache=ResultCache(),
    )
    assert other.cached
    assert "img_1" not in one.text


async def test_many_at_once(tools, images):
    executor = ToolExecutor(tools, max_concurrency=8, timeout_s=60)
    actions = [call("text_search", q="mayor"), call("image_search", url="img_1"), call("sharpen", image="img_1")] * 10
    results = await asyncio.gather(*(executor.execute(action, images, KEY) for action in actions))
    await executor.aclose()
    assert all(result.error is None for result in results)
    assert len({(result.tool, result.text) for result in results}) == 3


def test_options(world):
    assert [tool.name for tool in offline_tools(world)] == NAMES
    assert [tool.name for tool in offline_tools(world, names=["crop", "text_search"])] == ["crop", "text_search"]
    search, pictures = offline_tools(world, text_top_k=2, image_top_k=1)[:2]
    assert search.schema["function"]["parameters"]["properties"]["top_k"]["default"] == 2
    assert pictures.schema["function"]["parameters"]["properties"]["top_k"]["default"] == 1
    with pytest.raises(ConfigurationError, match=r"no tools \['paint'\]"):
        offline_tools(world, names=["paint"])
    with pytest.raises(ConfigurationError, match="named twice"):
        offline_tools(world, names=["crop", "crop"])
    with pytest.raises(ConfigurationError, match="workers is 0"):
        offline_tools(world, workers=0)


def test_picture_tools_share_a_backend(tools):
    backends = {tool.name: tool.backend for tool in tools}
    assert {backends[name] for name in NAMES[3:]} == {"image_processing"}
    assert len(set(backends.values())) == 4
