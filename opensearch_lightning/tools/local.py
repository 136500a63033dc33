"""The searches and OCR on local backends, and all seven tools together: no network, no weights to download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from PIL.Image import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import schemas
from opensearch_lightning.tools.edsr import EDSR
from opensearch_lightning.tools.formatting import passages, sources
from opensearch_lightning.tools.image_index import ImageHit, ImageIndex
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.layout import LayoutSource, layout_output
from opensearch_lightning.tools.local_tool import LocalTool, worker_count
from opensearch_lightning.tools.ocr import LayoutReader
from opensearch_lightning.tools.picture_calls import (
    crop_tool,
    perspective_correct_tool,
    sharpen_tool,
    super_resolution_tool,
)
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.schemas import Coordinates
from opensearch_lightning.tools.summary import ExtractiveSummarizer
from opensearch_lightning.tools.text_index import TextIndex


class OfflineWorld(Protocol):
    """What the local searches look into."""

    @property
    def text_index(self) -> TextIndex:
        """Pages for ``text_search``."""
        ...

    @property
    def image_index(self) -> ImageIndex:
        """Pictures for ``image_search``."""
        ...


class PictureIndex(Protocol):
    """What finds pictures that look like one."""

    def search(self, image: Image, top_k: int = 5) -> list[ImageHit]:
        """The best hits, best first."""
        ...


def search_text(
    index: TextIndex, summarizer: ExtractiveSummarizer, arguments: Mapping[str, Any], images: ImageBook
) -> ToolOutput:
    """``text_search``: pages of the index, each with a summary for the query. The index has one language, so that
    ``hl`` changes nothing.
    """
    hits = index.search(arguments["q"], arguments["top_k"])
    results = [(hit.title, hit.url, summarizer.summarize(arguments["q"], hit.title, hit.text)) for hit in hits]
    return ToolOutput(text=passages(results), hits=len(hits))


def search_image(index: PictureIndex, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
    """``image_search``: indexed pictures that look the same."""
    hits = index.search(images.get(arguments["url"]), arguments["top_k"])
    return ToolOutput(text=sources([(hit.title, hit.url) for hit in hits]), hits=len(hits))


def parse_layout(
    reader: LayoutSource, arguments: Mapping[str, Any], images: ImageBook, *, show_boxes: bool = False
) -> ToolOutput:
    """``layout_parsing``: the text of an image in reading order; with ``show_boxes`` block by block."""
    upright = arguments["use_doc_orientation_classify"]
    layout = reader.read(images.get(arguments["image"]), any_orientation=upright)
    return layout_output(layout, show_boxes=show_boxes, charts_left_out=arguments["use_chart_recognition"])


def local_text_search(
    world: OfflineWorld, *, top_k: int = 5, summary_sentences: int = 1, workers: int | None = None
) -> LocalTool:
    """``text_search`` among the pages of a world.

    Args:
        world: anything with a ``text_index`` (and an ``image_index``).
        top_k: passages when a call does not say.
        summary_sentences: sentences of each passage, 1 to 4.
        workers: calls at once; by default the number of cores.

    Raises:
        ConfigurationError: a value out of range.
    """
    return LocalTool(
        name="text_search",
        backend="text_search",
        schema=schemas.text_search_schema(top_k),
        function=partial(search_text, world.text_index, ExtractiveSummarizer(summary_sentences)),
        backend_limit=worker_count(workers),
        variant=f"{summary_sentences} sentences",
    )


def local_image_search(world: OfflineWorld, *, top_k: int = 5, workers: int | None = None) -> LocalTool:
    """``image_search`` among the pictures of a world; arguments as :func:`local_text_search`."""
    return index_image_search(world.image_index, top_k=top_k, workers=workers)


def index_image_search(index: PictureIndex, *, top_k: int = 5, workers: int | None = None) -> LocalTool:
    """``image_search`` in any index of pictures; ``top_k`` and ``workers`` as :func:`local_text_search`."""
    return LocalTool(
        name="image_search",
        backend="image_search",
        schema=schemas.image_search_schema(top_k),
        function=partial(search_image, index),
        backend_limit=worker_count(workers),
        variant=type(index).__name__,
    )


def local_layout_parsing(
    *, reader: LayoutSource | None = None, show_boxes: bool = False, workers: int | None = None
) -> LocalTool:
    """``layout_parsing`` on this machine.

    Args:
        reader: OCR to use; by default RapidOCR with an engine for every second worker, at most four.
        show_boxes: tell the policy each block's label and box too.
        workers: of the default reader; by default the number of cores.

    Raises:
        ConfigurationError: ``workers`` below 1.
    """
    reading = reader or LayoutReader(engines=max(1, min(4, worker_count(workers) // 2)))
    return LocalTool(
        name="layout_parsing",
        backend="ocr",
        schema=schemas.LAYOUT_PARSING,
        function=partial(parse_layout, reading, show_boxes=show_boxes),
        backend_limit=reading.engines,
        variant=f"{type(reading).__name__}, boxes {show_boxes}",
    )


def offline_tools(
    world: OfflineWorld,
    *,
    names: Sequence[str] | None = None,
    text_top_k: int = 5,
    image_top_k: int = 5,
    summary_sentences: int = 1,
    reader: LayoutSource | None = None,
    show_boxes: bool = False,
    workers: int | None = None,
    coordinates: Coordinates = "pixels",
    super_resolution: EDSR | None = None,
) -> list[LocalTool]:
    """The seven tools over a world's indexes.

    Backends: ``text_search``, ``image_search``, ``ocr``, and ``image_processing`` for the four that make images; with
    an EDSR network ``super_resolution`` is a backend of its own.

    Args:
        world: anything with a ``text_index`` and an ``image_index``.
        names: which tools, by wire name; all by default.
        text_top_k: passages when a call does not say.
        image_top_k: picture results when a call does not say.
        summary_sentences: sentences of each passage, 1 to 4.
        reader: OCR to use; by default RapidOCR with an engine for every second worker, at most four.
        show_boxes: tell the policy label and box of each block of text too.
        workers: calls of one backend at once; by default the number of cores.
        coordinates: see :func:`~opensearch_lightning.tools.picture_calls.crop_tool`.
        super_resolution: the network of ``super_resolution``; by default Lanczos.

    Raises:
        ConfigurationError: an unknown or repeated name, other ``coordinates``, or ``workers`` below 1.
    """
    tools = [
        local_text_search(world, top_k=text_top_k, summary_sentences=summary_sentences, workers=workers),
        local_image_search(world, top_k=image_top_k, workers=workers),
        local_layout_parsing(reader=reader, show_boxes=show_boxes, workers=workers),
        crop_tool(coordinates=coordinates, workers=workers),
        sharpen_tool(workers=workers),
        super_resolution_tool(network=super_resolution, workers=workers),
        perspective_correct_tool(workers=workers),
    ]
    if names is None:
        return tools
    by_name = {tool.name: tool for tool in tools}
    if unknown := sorted(set(names) - by_name.keys()):
        raise ConfigurationError(f"There are no tools {unknown}: choose from {sorted(by_name)}.")
    if len(set(names)) != len(names):
        raise ConfigurationError(f"tools are named twice in {list(names)}: name each once.")
    return [by_name[name] for name in names]
