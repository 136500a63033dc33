"""Values of a record: shown in a message, checked to be text."""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow

_IDS = ("id", "data_id", "sample_id", "question_id", "uid")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """``value`` for a message: short, whatever its size and depth."""
    try:
        return _SHORT.repr(value)[:120].encode(errors="backslashreplace").decode()
    # A number of more digits than Python writes.
    except ValueError:
        return type(value).__name__


def encodable(part: str, text: str) -> str:
    """``text`` itself, if it can be stored and tokenized.

    Raises:
        UnusableRow: it holds half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow(DropReason.BAD_TEXT, f"the {part} holds half a surrogate pair: {error}.") from error
    return text


def record_id(record: Mapping[str, Any]) -> str | None:
    """The id that a record brings, if it is a text or a whole number.

    Raises:
        UnusableRow: it holds half a surrogate pair.
    """
    for key in _IDS:
        found = record.get(key)
        if isinstance(found, str) and found.strip():
            return encodable("id", found)
        if isinstance(found, int) and not isinstance(found, bool) and abs(found) < 2**127:
            return str(found)
    return None


def is_scalar(value: Any) -> bool:
    """Whether ``value`` is a text, number or truth value that JSON can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 2**127


def as_json(value: Any) -> str | None:
    """``value`` as strict JSON; ``None`` if it cannot be written."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text
