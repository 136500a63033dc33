"""Function schemas of the seven tools (Table 1, Appendix F), and other names that tools and arguments go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from opensearch_lightning.errors import ConfigurationError

IMAGE_ID = "image-id"
MOST_RESULTS = 20
"""Most results that a search is asked for."""

Schema = dict[str, Any]
Coordinates = Literal["pixels", "relative_1000"]


def _function(name: str, description: str, required: list[str], **properties: Schema) -> Schema:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _image() -> Schema:
    return {"type": "string", "format": IMAGE_ID, "description": "image id, such as img_1"}


def _top_k(default: int) -> Schema:
    if not 1 <= default <= MOST_RESULTS:
        raise ConfigurationError(f"top_k is {default}: set 1 to {MOST_RESULTS}.")
    return {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS, "default": default}


def _flag(description: str) -> Schema:
    return {"type": "boolean", "default": False, "description": description}


def text_search_schema(top_k: int = 5) -> Schema:
    """Schema of ``text_search`` with a default number of passages."""
    return _function(
        "text_search",
        "Search the web; returns titles, addresses and summaries of the best pages.",
        ["q"],
        q={"type": "string", "minLength": 1, "description": "search query"},
        hl={"type": "string", "default": "en", "description": "language code"},
        top_k=_top_k(top_k),
    )


def image_search_schema(top_k: int = 5) -> Schema:
    """Schema of ``image_search`` with a default number of results."""
    return _function(
        "image_search",
        "Reverse image search; returns titles and sources of pictures that look alike.",
        ["url"],
        url=_image(),
        top_k=_top_k(top_k),
    )


LAYOUT_PARSING = _function(
    "layout_parsing",
    "Read the text in an image (OCR), in reading order.",
    ["image"],
    image=_image(),
    use_chart_recognition=_flag("read charts too"),
    use_doc_orientation_classify=_flag("turn the page upright first"),
)


def crop_schema(coordinates: Coordinates = "pixels") -> Schema:
    """Schema of ``crop`` with the box in pixels of the image, or in thousandths of its width and height as Qwen3-VL
    gives places in pictures.

    Raises:
        ConfigurationError: other coordinates.
    """
    if coordinates not in get_args(Coordinates):
        raise ConfigurationError(f"coordinates is {coordinates!r}: set one of {list(get_args(Coordinates))}.")
    unit, corner, extent = "pixels of that image", {}, {"exclusiveMinimum": 0}
    if coordinates == "relative_1000":
        unit = "x and width in thousandths of that image's width, y and height of its height (0 to 1000)"
        corner, extent = {"minimum": 0, "maximum": 1000}, {"exclusiveMinimum": 0, "maximum": 1000}
    return _function(
        "crop",
        f"Cut a box out of an image; {unit}, origin top left.",
        ["image", "x", "y", "width", "height"],
        image=_image(),
        x={"type": "number", **corner},
        y={"type": "number", **corner},
        width={"type": "number", **extent},
        height={"type": "number", **extent},
    )


CROP = crop_schema()
SHARPEN = _function(
    "sharpen",
    "Sharpen a blurred image (unsharp mask).",
    ["image"],
    image=_image(),
    amount={"type": "number", "minimum": 0, "maximum": 10, "default": 1.5},
)


def super_resolution_schema(scale: int = 4) -> Schema:
    """Schema of ``super_resolution`` with a default scale."""
    return _function(
        "super_resolution",
        "Enlarge a small image.",
        ["image"],
        image=_image(),
        scale={"type": "integer", "minimum": 2, "maximum": 4, "default": scale},
    )


PERSPECTIVE_CORRECT = _function(
    "perspective_correct",
    "Straighten a board or page seen at an angle.",
    ["image"],
    image=_image(),
)

TOOL_ALIASES: Mapping[str, str] = {"web_search": "text_search", "ocr": "layout_parsing"}

_IMAGE_ALIASES = {"url": "image", "image_id": "image", "image_url": "image", "img": "image"}
ARGUMENT_ALIASES: Mapping[str, Mapping[str, str]] = {
    "text_search": {"query": "q", "lang": "hl"},
    "image_search": {"image": "url", "image_id": "url", "image_url": "url", "img": "url"},
    "layout_parsing": _IMAGE_ALIASES,
    "crop": {**_IMAGE_ALIASES, "w": "width", "h": "height"},
    "sharpen": _IMAGE_ALIASES,
    "super_resolution": _IMAGE_ALIASES,
    "perspective_correct": _IMAGE_ALIASES,
}
