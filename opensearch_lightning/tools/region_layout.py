"""Local layout parsing: rapid-layout finds the regions of a page, RapidOCR reads the lines in them.

Regions are named in the words of PP-StructureV3. The model's ``title`` is ``doc_title`` when it is the page's largest
and stands above the text, ``text`` when it is really a paragraph, else ``paragraph_title``; ``figure`` is ``image``,
its caption ``figure_title``, the caption of a table ``table_title``, ``equation`` is ``formula`` (its text as read, not
LaTeX).
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools.html_tables import html_table
from opensearch_lightning.tools.layout import Block, Layout
from opensearch_lightning.tools.ocr import layout_blocks, rows_in_order
from opensearch_lightning.tools.reading_order import Box, reading_order
from opensearch_lightning.tools.text_lines import EnginePool, Line, LineReader

if TYPE_CHECKING:
    from PIL import Image

LABELS = {
    "text": "text",
    "title": "paragraph_title",
    "figure": "image",
    "figure_caption": "figure_title",
    "table": "table",
    "table_caption": "table_title",
    "header": "header",
    "footer": "footer",
    "reference": "reference",
    "equation": "formula",
}
"""Names of regions in PP-StructureV3's words, by those of the model (trained on CDLA)."""

_CAPTIONED = {"figure_title": "image", "table_title": "table"}
_OPENINGS = {
    "figure_title": re.compile(r"(figure|fig\.?)\s*\d+\s*[.:]|图\s*\d+", re.IGNORECASE),
    "table_title": re.compile(r"(table|tab\.?)\s*\d+\s*[.:]|表\s*\d+", re.IGNORECASE),
}
_TITLES = ("doc_title", "paragraph_title")
# The rest of what a page says stands between them.
_FIRST, _LAST = "header", "footer"
_INSIDE = 0.5
_SAME_REGION = 0.8
_DOC_TITLE_HEIGHT = 1.4
# In heights of a usual line: how far a caption is from its figure, and by how much regions may overlap.
_CAPTION_GAP, _TOLERANCE = 3.0, 0.5
# They log to stderr through handlers of their own.
_LOGGERS = ("inference_engine.base", "inference_engine.onnxruntime.main", "model_handler.main", "model_handler.utils")


@dataclass(frozen=True, kw_only=True)
class Region:
    """A region of a page: a value of :data:`LABELS`, box in pixels, and the model's confidence in [0, 1]."""

    label: str
    box: Box
    confidence: float = 1.0


class RegionLayoutReader:
    """Reads pages with a layout model; lines outside all regions become blocks as :class:`LayoutReader` makes them.

    Safe to share by threads.

    Args:
        min_line_height: lower lines, in pixels of the image, are not read: too many characters come out wrong.
        min_confidence: of a region, in [0, 1].
        engines: images read at once; each holds its own models, made when first needed, and one thread.

    Raises:
        ConfigurationError: rapid-layout is not installed, ``engines`` below 1, or ``min_confidence`` out of range.
    """

    def __init__(self, *, min_line_height: float = 14.0, min_confidence: float = 0.5, engines: int = 1) -> None:
        if not 0 <= min_confidence <= 1:
            raise ConfigurationError(f"min_confidence is {min_confidence}: set a number from 0 to 1.")
        _check_installed()
        self.engines = engines
        self._min_line_height = min_line_height
        self._lines = LineReader(engines)
        self._models: EnginePool[Any] = EnginePool(partial(_make_model, min_confidence), engines)

    def read(self, image: Image.Image, *, any_orientation: bool = False) -> Layout:
        """Layout of an RGB image; with ``any_orientation`` of the quarter turn of it that reads best."""
        lines, upright, turned = self._lines.read_turned(image, any_orientation=any_orientation)
        tall = [line for line in lines if line.height >= self._min_line_height]
        blocks = region_blocks(self.regions(upright), tall)
        return Layout(blocks=tuple(blocks), too_small=len(lines) - len(tall), turned=turned)

    def regions(self, image: Image.Image) -> list[Region]:
        """Regions of an RGB image, without those that say the same of the same place."""
        with self._models.engine() as model:
            found = model(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))
        width, height = image.size
        regions = [
            Region(label=LABELS.get(name, "text"), box=_clipped(box, width, height), confidence=score)
            for box, name, score in zip(found.boxes, found.class_names, found.scores, strict=True)
        ]
        return _distinct([region for region in regions if _area(region.box) > 0])


def region_blocks(regions: Sequence[Region], lines: Sequence[Line]) -> list[Block]:
    """Blocks in reading order: each region with its lines, and the lines that lie in none.

    The text in an image follows it in blocks of its own. Without regions the blocks are those of
    :func:`~opensearch_lightning.tools.ocr.layout_blocks`.
    """
    inside: list[list[Line]] = [[] for _ in regions]
    outside: list[Line] = []
    for line in lines:
        home = _home(line, regions)
        (outside if home is None else inside[home]).append(line)
    if not regions:
        return layout_blocks(outside)
    usual = statistics.median(line.height for line in lines) if lines else 0.0
    regions = [_reconsidered(region, own, usual) for region, own in zip(regions, inside, strict=True)]
    title = _doc_title(regions, inside, usual)
    groups = [[block] for block in _renamed(layout_blocks(outside))]
    for number, region in enumerate(regions):
        label = "doc_title" if number == title else region.label
        group = _blocks(label, region.box, inside[number], usual)
        # A region of words in which none can be read says nothing; an image without words does.
        if group[0].content or label in ("image", "table"):
            groups.append(group)
    return _in_order(groups, usual)


def _check_installed() -> None:
    try:
        import rapid_layout  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"Layout parsing by regions needs rapid-layout ({error}): pip install 'opensearch-lightning[layout]'."
        ) from error


def _make_model(min_confidence: float) -> Any:
    import rapid_layout

    for name in _LOGGERS:
        logging.getLogger(f"rapid_layout.{name}").disabled = True
    # By path: by name, a model that is missing or changed would be fetched from the internet.
    weights = Path(rapid_layout.__file__).parent / "models" / "layout_cdla.onnx"
    if not weights.is_file():
        raise ConfigurationError(f"rapid-layout lacks its model {weights}: install 'rapid-layout>=1.2,<2' anew.")
    threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    return rapid_layout.RapidLayout(
        model_type="pp_layout_cdla", model_dir_or_path=str(weights), conf_thresh=min_confidence, engine_cfg=threads
    )


def _clipped(box: Sequence[float], width: int, height: int) -> Box:
    left, top, right, bottom = (float(side) for side in box)
    return max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))


def _distinct(regions: list[Region]) -> list[Region]:
    kept: list[Region] = []
    for region in sorted(regions, key=lambda region: -region.confidence):
        if all(_overlap(region.box, other.box) < _SAME_REGION * _larger(region.box, other.box) for other in kept):
            kept.append(region)
    return kept


def _home(line: Line, regions: Sequence[Region]) -> int | None:
    """The region that a line lies in, of several the one that holds most of it, then the smallest."""
    box = (line.left, line.top, line.right, line.bottom)
    shares = [_overlap(box, region.box) for region in regions]
    homes = [number for number, share in enumerate(shares) if share >= _INSIDE * _area(box) > 0]
    return min(homes, key=lambda number: (-round(shares[number]), _area(regions[number].box))) if homes else None


def _doc_title(regions: Sequence[Region], inside: Sequence[Sequence[Line]], usual: float) -> int | None:
    """The title in the largest type, if clearly larger than usual and no paragraph stands above it."""
    titles = [number for number, region in enumerate(regions) if region.label == "paragraph_title" and inside[number]]
    if not titles:
        return None
    first = max(titles, key=lambda number: (_type_size(inside[number]), -regions[number].box[1]))
    # A single line of text above it may well be a header that the model did not see as one.
    tops = [
        region.box[1] for region, lines in zip(regions, inside, strict=True) if region.label == "text" and lines[1:]
    ]
    above = any(regions[first].box[1] > top for top in tops)
    return None if above or _type_size(inside[first]) < _DOC_TITLE_HEIGHT * usual else first


def _type_size(lines: Sequence[Line]) -> float:
    return statistics.median(line.height for line in lines)


def _reconsidered(region: Region, lines: Sequence[Line], usual: float) -> Region:
    """The region under the label that its lines give it, where the model is known to err: short paragraphs pass for
    titles and captions for text.
    """
    if region.label == "paragraph_title" and len(lines) > 2 and _type_size(lines) < _DOC_TITLE_HEIGHT * usual:
        return replace(region, label="text")
    if region.label == "text" and 1 <= len(lines) <= 2:
        words = min(lines, key=lambda line: (line.top, line.left)).text
        for label, opening in _OPENINGS.items():
            if opening.match(words):
                return replace(region, label=label)
    return region


def _blocks(label: str, box: Box, lines: list[Line], usual: float) -> list[Block]:
    if label == "image":
        return [Block(label=label, content="", box=box), *_renamed(layout_blocks(lines))]
    if label == "table":
        return [Block(label=label, content=html_table(lines) if lines else "", box=box)]
    words = [line.text for row in rows_in_order(lines, usual) for line in row]
    return [Block(label=label, content=" ".join(words), box=box)]


def _renamed(blocks: list[Block]) -> list[Block]:
    return [replace(block, label="paragraph_title") if block.label == "title" else block for block in blocks]


def _in_order(groups: list[list[Block]], usual: float) -> list[Block]:
    """All blocks, those of a group one after the other; the first of a group says what it is."""
    first = [group for group in groups if group[0].label == _FIRST]
    last = [group for group in groups if group[0].label == _LAST]
    body = _with_captions([group for group in groups if group[0].label not in (_FIRST, _LAST)], usual)
    boxes = [_hull([block.box for block in group]) for group in body]
    titles = [number for number, group in enumerate(body) if group[0].label in _TITLES]
    order = reading_order(boxes, titles=titles, tolerance=_TOLERANCE * usual)
    placed = [*sorted(first, key=_place), *(body[number] for number in order), *sorted(last, key=_place)]
    return [block for group in placed for block in group]


def _with_captions(groups: list[list[Block]], usual: float) -> list[list[Block]]:
    """Captions joined to what they stand closely above or below, so that a short one spans what its figure spans."""
    joined = [list(group) for group in groups if group[0].label not in _CAPTIONED]
    things = [(group[0], group) for group in joined]
    for [caption] in (group for group in groups if group[0].label in _CAPTIONED):
        fitting = [n for n, (thing, _) in enumerate(things) if thing.label == _CAPTIONED[caption.label]]
        near = min(fitting, key=lambda n: _gap(caption.box, things[n][0].box), default=None)
        if near is not None and _gap(caption.box, things[near][0].box) <= _CAPTION_GAP * usual:
            thing, group = things[near]
            group.insert(0 if caption.box[1] < thing.box[1] else len(group), caption)
        else:
            joined.append([caption])
    return joined


def _place(group: list[Block]) -> tuple[float, float]:
    return group[0].box[1], group[0].box[0]


def _gap(caption: Box, thing: Box) -> float:
    """Pixels between a caption and a thing above or below it; infinite where it stands beside."""
    beside = min(caption[2], thing[2]) <= max(caption[0], thing[0])
    return float("inf") if beside else max(0.0, caption[1] - thing[3], thing[1] - caption[3])


def _hull(boxes: Sequence[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _larger(first: Box, second: Box) -> float:
    return max(_area(first), _area(second))


def _overlap(first: Box, second: Box) -> float:
    corners = (max(first[0], second[0]), max(first[1], second[1]), min(first[2], second[2]), min(first[3], second[3]))
    return _area(corners)
