"""Outputs of tools as rows of a database."""

from __future__ import annotations

from opensearch_lightning.pictures import png_bytes, read_picture
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.threads import in_thread

COLUMNS = "text TEXT, image BLOB, hits INTEGER, note TEXT"
"""SQL of the columns of :data:`OutputRow`."""

OutputRow = tuple[str, bytes | None, int | None, str | None]


async def to_row(output: ToolOutput) -> OutputRow:
    """``output`` as a row, its image as PNG."""
    image = output.image
    encoded = None if image is None else await in_thread(lambda: png_bytes(image))
    return output.text, encoded, output.hits, output.note


async def from_row(row: OutputRow) -> ToolOutput:
    """The output that :func:`to_row` made ``row`` of.

    Raises:
        DataError: its image is broken.
    """
    text, encoded, hits, note = row
    image = None if encoded is None else await in_thread(lambda: read_picture(encoded))
    return ToolOutput(text=text, image=image, hits=hits, note=note)
