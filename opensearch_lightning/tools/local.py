"""The seven tools on local backends: no network, no weights to download."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from PIL.Image import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import picture_tools, schemas
from opensearch_lightning.tools.edsr import EDSR
from opensearch_lightning.tools.formatting import passages, sources
from opensearch_lightning.tools.image_index import ImageIndex
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.layout import LayoutSource, layout_output
from opensearch_lightning.tools.ocr import LayoutReader
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.schemas import Coordinates
from opensearch_lightning.tools.summary import ExtractiveSummarizer
from opensearch_lightning.tools.text_index import TextIndex
from opensearch_lightning.tools.threads import in_thread


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


@dataclass(frozen=True, kw_only=True)
class LocalTool:
    """A tool made of a blocking function, which runs in a thread.

    ``function(arguments, images)`` gets checked arguments and may raise
    :class:`~opensearch_lightning.errors.ToolError`; at most ``backend_limit`` calls of one backend run at once.
    """

    name: str
    backend: str
    schema: Mapping[str, Any]
    function: Callable[[Mapping[str, Any], ImageBook], ToolOutput]
    backend_limit: int

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call in a thread."""
        return await in_thread(partial(self.function, arguments, images))


def search_text(
    index: TextIndex, summarizer: ExtractiveSummarizer, arguments: Mapping[str, Any], images: ImageBook
) -> ToolOutput:
    """``text_search``: pages of the index, each with a summary for the query. The index has one language, so that
    ``hl`` changes nothing.
    """
    hits = index.search(arguments["q"], arguments["top_k"])
    results = [(hit.title, hit.url, summarizer.summarize(arguments["q"], hit.title, hit.text)) for hit in hits]
    return ToolOutput(text=passages(results), hits=len(hits))


def search_image(index: ImageIndex, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
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


def _crop(coordinates: Coordinates, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
    box = {side: arguments[side] for side in ("x", "y", "width", "height")}
    return picture_tools.crop(images.get(arguments["image"]), **box, coordinates=coordinates)


def _sharpen(arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
    return picture_tools.sharpen(images.get(arguments["image"]), arguments["amount"])


def _super_resolution(
    enlarge: Callable[[Image, int], ToolOutput], arguments: Mapping[str, Any], images: ImageBook
) -> ToolOutput:
    return enlarge(images.get(arguments["image"]), arguments["scale"])


def _perspective_correct(arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
    return picture_tools.perspective_correct(images.get(arguments["image"]))


def _enlarging(edsr: EDSR | None, limit: int) -> LocalTool:
    """``super_resolution``: a network has a backend of its own, whose few turns hold up no other picture tool."""
    return LocalTool(
        name="super_resolution",
        backend="image_processing" if edsr is None else "super_resolution",
        schema=schemas.super_resolution_schema(4 if edsr is None else edsr.scale or 4),
        function=partial(_super_resolution, picture_tools.super_resolution if edsr is None else edsr.enlarge),
        backend_limit=limit if edsr is None else edsr.workers,
    )


def offline_tools(
    world: OfflineWorld,
    *,
    names: Sequence[str] | None = None,
    text_top_k: int = 5,
    image_top_k: int = 5,
    summary_sentences: int = 1,
    reader: LayoutReader | None = None,
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
        reader: OCR to use; by default one with an engine for every second core, at most four.
        workers: calls of one backend at once; by default the number of cores.
        coordinates: what the boxes of ``crop`` are measured in; its schema says so to the policy. ``"pixels"`` of the
            image at hand, or ``"relative_1000"``: thousandths of its width and height, as Qwen3-VL gives places.
        super_resolution: the network of ``super_resolution``, whose scale becomes the default one; by default Lanczos.

    Raises:
        ConfigurationError: an unknown or repeated name, other ``coordinates``, or ``workers`` below 1.
    """
    cores = os.cpu_count() or 1
    limit = cores if workers is None else workers
    if limit < 1:
        raise ConfigurationError(f"workers is {workers}: set 1 or more, or None for one a core.")
    engines = max(1, min(4, limit // 2))
    reading = reader or LayoutReader(engines=engines)
    search = partial(search_text, world.text_index, ExtractiveSummarizer(summary_sentences))
    tool = partial(LocalTool, backend_limit=limit)
    picture = partial(tool, backend="image_processing")
    tools = [
        tool(name="text_search", backend="text_search", schema=schemas.text_search_schema(text_top_k), function=search),
        tool(
            name="image_search",
            backend="image_search",
            schema=schemas.image_search_schema(image_top_k),
            function=partial(search_image, world.image_index),
        ),
        LocalTool(
            name="layout_parsing",
            backend="ocr",
            schema=schemas.LAYOUT_PARSING,
            function=partial(parse_layout, reading),
            backend_limit=engines,
        ),
        picture(name="crop", schema=schemas.crop_schema(coordinates), function=partial(_crop, coordinates)),
        picture(name="sharpen", schema=schemas.SHARPEN, function=_sharpen),
        _enlarging(super_resolution, limit),
        picture(name="perspective_correct", schema=schemas.PERSPECTIVE_CORRECT, function=_perspective_correct),
    ]
    if names is None:
        return tools
    by_name = {tool.name: tool for tool in tools}
    if unknown := sorted(set(names) - by_name.keys()):
        raise ConfigurationError(f"There are no tools {unknown}: choose from {sorted(by_name)}.")
    if len(set(names)) != len(names):
        raise ConfigurationError(f"tools are named twice in {list(names)}: name each once.")
    return [by_name[name] for name in names]
