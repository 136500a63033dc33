"""``layout_parsing`` by a PaddleX server that serves PP-StructureV3.

``POST /layout-parsing`` as the PaddleX tutorial of the pipeline and the schemas of its serving code describe it. The
list of blocks is in reading order: ``block_order`` only counts those that have a place in it, and older servers leave
it out.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any

from PIL import Image

from opensearch_lightning.errors import ToolError
from opensearch_lightning.pictures import png_bytes
from opensearch_lightning.tools import schemas
from opensearch_lightning.tools.layout import Block, Layout, layout_output
from opensearch_lightning.tools.online.service import Service
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

if TYPE_CHECKING:
    from opensearch_lightning.tools.backends import BackendPolicy
    from opensearch_lightning.tools.images import ImageBook
    from opensearch_lightning.tools.protocol import ToolOutput

NAME = "PaddleX"
_PATH = "/layout-parsing"
_IMAGE_FILE = 1


class PaddleXLayoutParsing:
    """Reads images with PP-StructureV3: tables come as HTML, formulas as LaTeX.

    Args:
        base_url: of the server, such as ``http://localhost:8080``, with or without ``/layout-parsing``; it may be a
            private one.
        api_key_env: the environment variable that holds a token, sent as ``Authorization: token …``; ``None`` for none.
        policy: limits, retries and breaker; ``None`` for the defaults.
        timeout_s: seconds of a call where the policy sets none.
        max_bytes: most bytes of an answer.
        show_boxes: tell the policy each block's label and box too.

    Raises:
        ConfigurationError: an address, a name or a limit that cannot be.
        MissingKeyError: the variable is not set.
    """

    name = "layout_parsing"
    backend = "ocr"
    schema: Mapping[str, Any] = schemas.LAYOUT_PARSING

    def __init__(
        self,
        base_url: str,
        *,
        api_key_env: str | None = None,
        policy: BackendPolicy | None = None,
        timeout_s: float = 60.0,
        max_bytes: int = 20_000_000,
        show_boxes: bool = False,
    ) -> None:
        self._key = Secret.from_environment(api_key_env) if api_key_env is not None else None
        address = base_url.rstrip("/").removesuffix(_PATH)
        self._service = Service(NAME, address, key=self._key, policy=policy, timeout_s=timeout_s, max_bytes=max_bytes)
        self._show_boxes = show_boxes
        self.variant = f"{NAME}, boxes {show_boxes}"

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call.

        Raises:
            ToolError: of the kind of what went wrong.
        """
        layout = await self.parse(
            images.get(arguments["image"]),
            charts=arguments["use_chart_recognition"],
            upright=arguments["use_doc_orientation_classify"],
        )
        return layout_output(layout, show_boxes=self._show_boxes)

    async def parse(self, image: Image.Image, *, charts: bool = False, upright: bool = False) -> Layout:
        """Layout of an RGB image.

        Args:
            image: any size.
            charts: read charts, which the server must be set up for.
            upright: turn the page upright first; boxes are then pixels of the turned page.

        Raises:
            ToolError: of the kind of what went wrong.
        """
        body = await in_thread(partial(_request, image, charts=charts, upright=upright))
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"token {self._key.reveal()}"
        answer = await self._service.request("POST", _PATH, headers=headers, data=body)
        return _layout(answer)

    def probes(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """One real try of the server, on a small white image; raises :class:`ToolError` where it fails."""
        return {NAME: self._probe}

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones, on any loop."""
        await self._service.aclose()

    async def _probe(self) -> None:
        await self.parse(Image.new("RGB", (64, 64), "white"))


def _request(image: Image.Image, *, charts: bool, upright: bool) -> bytes:
    payload = {
        "file": base64.b64encode(png_bytes(image)).decode("ascii"),
        "fileType": _IMAGE_FILE,
        "useDocOrientationClassify": upright,
        "useDocUnwarping": False,
        "useChartRecognition": charts,
        "visualize": False,
    }
    return json.dumps(payload).encode()


def _layout(answer: Any) -> Layout:
    """Layout in an answer.

    Raises:
        ToolError: the answer says that it failed, or is not what the server should answer.
    """
    try:
        code = _typed(_typed(answer, dict)["errorCode"], int)
        if code == 0:
            page = _typed(answer["result"]["layoutParsingResults"][0]["prunedResult"], dict)
            blocks = tuple(_block(_typed(block, dict)) for block in _typed(page["parsing_res_list"], list))
            return Layout(blocks=blocks, turned=_is_turned(page))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # from None: the cause may hold a whole answer
        raise ToolError(ErrorKind.BACKEND_ERROR, f"{NAME} answered something else than a layout.") from None
    kind = ErrorKind.RATE_LIMITED if code == 429 else ErrorKind.BACKEND_ERROR
    raise ToolError(kind, f"{NAME} failed with code {code}.")


def _is_turned(page: Mapping[str, Any]) -> bool:
    # The angle is -1, or there is none, where the server was not asked to turn the page.
    prepared = page.get("doc_preprocessor_res")
    return isinstance(prepared, dict) and prepared.get("angle") in (90, 180, 270)


def _block(block: Mapping[str, Any]) -> Block:
    left, top, right, bottom = (_pixel(side) for side in _typed(block["block_bbox"], list))
    content = block.get("block_content")
    return Block(
        label=_typed(block["block_label"], str),
        content="" if content is None else _typed(content, str),
        box=(left, top, right, bottom),
    )


def _pixel(side: Any) -> float:
    if not math.isfinite(_typed(side, int | float)):
        raise ValueError("no pixel")
    return float(side)


def _typed(value: Any, kind: type | UnionType) -> Any:
    # JSON's true and false are integers to Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"not {kind}")
    return value
