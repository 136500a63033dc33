"""The content of a turn: a text, or a list of parts, with its images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.sft_row import PLACEHOLDER
from opensearch_lightning.data.sources.values import shown

_TEXT = "text"
_IMAGES = ("image", "image_url", "url", "path", "bytes")
_IMAGE_TYPES = ("image", "image_url")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What one placeholder stands for: ``value`` itself, or the image ``index`` of the row's column."""

    value: Any = None
    index: int | None = None


NEXT = Slot()
"""The next image of the row's column."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """Text with a placeholder for each of ``slots``, in order."""

    text: str
    slots: tuple[Slot, ...] = ()


def read_content(raw: Any, *, takes_images: bool) -> Content:
    """A content as text with placeholders.

    Args:
        raw: a text, or a list of texts and of parts ``{"type": "text" | "image" | "image_url", …}``. An image part
            holds its image, or an ``index`` into the row's column, or nothing: then it is the column's next.
        takes_images: whether placeholders and image parts of this turn are images.

    Raises:
        UnusableRow: a part is of another type, or an image where none may stand.
    """
    if isinstance(raw, str):
        return Content(text=raw, slots=(NEXT,) * (raw.count(PLACEHOLDER) if takes_images else 0))
    if not isinstance(raw, list | tuple):
        raise UnusableRow(DropReason.BAD_RECORD, f"a turn has a text or a list of parts, got {shown(raw)}.")
    texts: list[str] = []
    slots: list[Slot] = []
    for part in raw:
        text, slot = _part(part)
        if slot is None:
            texts.append(text)
            slots += [NEXT] * (text.count(PLACEHOLDER) if takes_images else 0)
        elif takes_images:
            texts.append(PLACEHOLDER)
            slots.append(slot)
        else:
            raise UnusableRow(DropReason.BAD_RECORD, "an image stands in a turn of the assistant or the system.")
    joined = "".join(texts)
    if joined.count(PLACEHOLDER) > len(slots) and takes_images:
        raise UnusableRow(DropReason.IMAGE_COUNT, f"the parts of a turn make up a {PLACEHOLDER} where they meet.")
    return Content(text=joined, slots=tuple(slots))


def _part(part: Any) -> tuple[str, Slot | None]:
    if isinstance(part, str):
        return part, None
    if not isinstance(part, Mapping):
        raise UnusableRow(DropReason.BAD_RECORD, f"a part of a turn is an object, got {shown(part)}.")
    kind = part.get("type")
    if kind is None:
        kind = _TEXT if isinstance(part.get(_TEXT), str) else "image"
    if kind == _TEXT and isinstance(part.get(_TEXT), str):
        return part[_TEXT], None
    if kind not in _IMAGE_TYPES:
        raise UnusableRow(DropReason.BAD_RECORD, f"a part of a turn is a text or an image, got {shown(part)}.")
    index = part.get("index")
    value = next((part[key] for key in _IMAGES if part.get(key) is not None), None)
    if value is not None:
        return "", Slot(value=value)
    if isinstance(index, int) and not isinstance(index, bool):
        return "", Slot(index=index)
    return "", NEXT
