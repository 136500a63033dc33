"""Renderers of SFT rows, one for each set of tools among them."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.data.sft_row import SFTRow

# A renderer holds its schemas and shares the rest; corpora in which every row has tools of its own exist.
_KEPT = 256


class RowRenderers:
    """Finds the renderer of a row's tools.

    Args:
        processor: a processor of Qwen3-VL.
        render_tools: put a row's tool schemas into its system turn, as the chat template does.
    """

    def __init__(self, processor: Any, *, render_tools: bool = True) -> None:
        self._render_tools = render_tools
        self._made: OrderedDict[str, ChatRenderer] = OrderedDict()
        self.without_tools = ChatRenderer(processor)

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """The renderer of rows with these schemas.

        Raises:
            ControlStringError: the schemas hold the text of a control token.
        """
        if not (tools and self._render_tools):
            return self.without_tools
        key = json.dumps(tools)
        if key not in self._made:
            self._made[key] = self.without_tools.with_tools(tools)
        self._made.move_to_end(key)
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def length(self, row: SFTRow) -> int:
        """Tokens of a row, image tokens counted; no patches are made.

        Raises:
            RenderError: it cannot be rendered.
        """
        return self.for_tools(row.tools).length(row.system, row.turns())
