"""What ``layout_parsing`` finds in an image, the same for all its backends, and how the policy is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from opensearch_lightning.errors import one_line
from opensearch_lightning.tools.protocol import ToolOutput

if TYPE_CHECKING:
    from PIL import Image

# Their line breaks mean something.
_VERBATIM = frozenset({"table", "chart", "formula", "algorithm"})


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines that belong together.

    ``label`` says what they are in the words of PP-StructureV3, such as ``doc_title``, ``paragraph_title``, ``text``,
    ``image``, ``figure_title``, ``table``, ``header``, ``footer``; a reader without a layout model says ``title`` or
    ``text``. ``content`` is plain text, HTML for a table, and empty for an image without text. ``box`` is (left, top,
    right, bottom) in pixels.
    """

    label: str
    content: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The blocks of one image in reading order.

    ``too_small`` counts lines seen but too low to be read. With ``turned`` the boxes are pixels of the image turned
    upright, not of the image as it was given.
    """

    blocks: tuple[Block, ...]
    too_small: int = 0
    turned: bool = False

    @property
    def formatted_text(self) -> str:
        """Contents of the blocks, one a line; tables, charts, formulas and programs keep their line breaks."""
        return "\n".join(content for block in self.blocks if (content := _content(block)))

    @property
    def boxed_text(self) -> str:
        """The blocks as ``[label] (left,top,right,bottom) content`` lines, those without text too."""
        return "\n".join(f"[{one_line(block.label)}] {_box(block)} {_content(block)}".rstrip() for block in self.blocks)


class LayoutSource(Protocol):
    """Reads images on this machine; safe to share by threads."""

    @property
    def engines(self) -> int:
        """Images read at once; a further one waits."""
        ...

    def read(self, image: Image.Image, *, any_orientation: bool = False) -> Layout:
        """Layout of an RGB image; with ``any_orientation`` of the quarter turn of it that reads best. Blocks."""
        ...


def layout_output(layout: Layout, *, show_boxes: bool = False, charts_left_out: bool = False) -> ToolOutput:
    """A layout as the policy gets it.

    Args:
        layout: what was found.
        show_boxes: give :attr:`Layout.boxed_text` instead of :attr:`Layout.formatted_text`.
        charts_left_out: the call asked for charts, and this backend reads none.
    """
    text = layout.boxed_text if show_boxes else layout.formatted_text
    notes = []
    if layout.too_small:
        notes.append("Some text is too small to read." if layout.formatted_text else "The text is too small to read.")
    if charts_left_out:
        notes.append("Charts are not recognised here, only text.")
    if show_boxes and layout.turned and layout.blocks:
        notes.append("Boxes are pixels of the image turned upright.")
    nothing = "" if layout.too_small else "No text found."
    return ToolOutput(text=text or nothing, note=" ".join(notes) or None)


def _content(block: Block) -> str:
    return block.content if block.label in _VERBATIM else " ".join(block.content.splitlines())


def _box(block: Block) -> str:
    return f"({','.join(str(round(side)) for side in block.box)})"
