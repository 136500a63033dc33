"""The four tools that make a picture of a picture, as the policy calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from PIL.Image import Image

from opensearch_lightning.tools import picture_tools, schemas
from opensearch_lightning.tools.edsr import EDSR
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.local_tool import LocalTool, worker_count
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.schemas import Coordinates

BACKEND = "image_processing"
"""Backend of the tools without a network."""


def crop_tool(*, coordinates: Coordinates = "pixels", workers: int | None = None) -> LocalTool:
    """``crop``.

    Args:
        coordinates: what boxes are measured in; the schema says so to the policy. ``"pixels"`` of the image at hand, or
            ``"relative_1000"``: thousandths of its width and height, as Qwen3-VL gives places.
        workers: calls at once; by default the number of cores.

    Raises:
        ConfigurationError: other ``coordinates``, or ``workers`` below 1.
    """
    schema = schemas.crop_schema(coordinates)
    return _tool("crop", schema, partial(_crop, coordinates), workers)


def sharpen_tool(*, workers: int | None = None) -> LocalTool:
    """``sharpen``; ``workers`` and errors as :func:`crop_tool`."""
    return _tool("sharpen", schemas.SHARPEN, _sharpen, workers)


def perspective_correct_tool(*, workers: int | None = None) -> LocalTool:
    """``perspective_correct``; ``workers`` and errors as :func:`crop_tool`."""
    return _tool("perspective_correct", schemas.PERSPECTIVE_CORRECT, _perspective_correct, workers)


def super_resolution_tool(*, network: EDSR | None = None, workers: int | None = None) -> LocalTool:
    """``super_resolution``, by Lanczos or a network.

    A network has a backend of its own, ``super_resolution``, whose few turns hold up no other picture tool; its scale
    becomes the default one.

    Args:
        network: the network, which says itself how many calls it takes at once; by default Lanczos.
        workers: calls at once without a network; by default the number of cores.

    Raises:
        ConfigurationError: ``workers`` below 1.
    """
    if network is None:
        schema = schemas.super_resolution_schema(4)
        return _tool("super_resolution", schema, partial(_super_resolution, picture_tools.super_resolution), workers)
    return LocalTool(
        name="super_resolution",
        backend="super_resolution",
        schema=schemas.super_resolution_schema(network.scale or 4),
        function=partial(_super_resolution, network.enlarge),
        backend_limit=network.workers,
        variant=f"EDSR {network.scale}",
    )


def _tool(
    name: str,
    schema: Mapping[str, Any],
    function: Callable[[Mapping[str, Any], ImageBook], ToolOutput],
    workers: int | None,
) -> LocalTool:
    return LocalTool(name=name, backend=BACKEND, schema=schema, function=function, backend_limit=worker_count(workers))


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
