"""Reading what a judge model wrote. What cannot be read is ``None``, never a default."""

import json
import re
from typing import Any, TypeVar

_T = TypeVar("_T")

_MARKUP = str.maketrans("", "", "*_`")
_TRUE = frozenset({"yes", "true", "correct"})
_FALSE = frozenset({"no", "false", "incorrect", "not correct", "wrong"})
_WORDS = "|".join(sorted(_TRUE | _FALSE, key=len, reverse=True))
# A value stands alone: what follows is the line's end or punctuation, but no alternative ("yes/no", "yes|no") and no
# further word ("no idea").
_VERDICT_LINE = re.compile(
    rf"^[\s\-#>]*(?:is\s+)?correct\s*[:=]\s*[\[(\"']*\s*({_WORDS})(?=\s*(?:$|[\])\"'.,;:!(–—]|-\s))(?!\s*[\])\"']*\s*[/|])",
    re.IGNORECASE | re.MULTILINE,
)
_VERDICT_KEY = re.compile(r"^[\s\-#>]*(?:is\s+)?correct\s*[:=]", re.IGNORECASE | re.MULTILINE)
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_SCORE_LINE = re.compile(
    rf"^[\s\-#>]*score\s*[:=]\s*[\[(\"']*\s*({_NUMBER})\s*(?:(%)|(?:/|out\s+of)\s*({_NUMBER}))?"
    r"(?=\s*(?:$|[\])\"';:!(–—]|[.,](?!\s*\d)|-\s+[^\d\s]))",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
_SCORE_KEY = re.compile(r"^[\s\-#>]*score\s*[:=]", re.IGNORECASE | re.MULTILINE)


def parse_verdict(text: str) -> bool | None:
    """Read a verdict: ``correct: yes|no`` on a line of its own, a JSON object with ``correct``, or the bare word.

    Returns:
        ``None`` when the text holds no verdict, an echoed choice (``[yes/no]``), or verdicts that differ.
    """
    plain = text.translate(_MARKUP)
    value = _json_value(text, "correct")
    told = [] if value is None else [value if isinstance(value, bool) else _word(str(value))]
    if not told and _VERDICT_KEY.search(plain) is None:
        return _word(plain)
    found = _VERDICT_LINE.findall(plain)
    if len(found) != len(_VERDICT_KEY.findall(plain)):
        return None
    return _agreed([*told, *(_word(word) for word in found)])


def parse_score(text: str) -> float | None:
    """Read a score in [0, 1]: ``score: 0.7``, ``7/10``, ``7 out of 10``, ``70%``, or a JSON object with ``score``.

    Returns:
        ``None`` when the text holds no score, one outside [0, 1], an echoed range, or scores that differ.
    """
    value = _json_value(text, "score")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _unit(value)
    plain = text.translate(_MARKUP) if value is None else f"score: {value}"
    found = _SCORE_LINE.findall(plain)
    if len(found) != len(_SCORE_KEY.findall(plain)):
        return None
    return _agreed([_ratio(number, percent, whole) for number, percent, whole in found])


def parse_object(text: str) -> dict[str, Any] | None:
    """Read a text that is one JSON object and nothing else.

    Returns:
        ``None`` for anything before or after it, a name given twice, or a number that is not finite.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def unwrapped(text: str) -> str:
    """``text`` without the reasoning before it (``…</think>``) and the code fence around it."""
    text = text.strip()
    if not text.startswith(("{", "```")):
        text = text.rpartition("</think>")[2].strip()
    fenced = _FENCE.fullmatch(text)
    return fenced[1].strip() if fenced else text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a name stands twice")
    return record


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _json_value(text: str, key: str) -> Any:
    """Value of ``key`` in the text's one JSON object (a code fence around it is allowed), else ``None``."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        record = json.loads(text[start : end + 1], object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    return record.get(key) if isinstance(record, dict) else None


def _word(text: str) -> bool | None:
    word = " ".join(text.casefold().strip(" \t\r\n.,;:!\"'[]()").split())
    return True if word in _TRUE else False if word in _FALSE else None


def _ratio(number: str, percent: str, whole: str) -> float | None:
    scale = 100.0 if percent else float(whole) if whole else 1.0
    return _unit(float(number) / scale) if scale > 0 else None


def _unit(value: float) -> float | None:
    # Compared first: a whole number of JSON may be one that no float holds.
    return float(value) if 0.0 <= value <= 1.0 else None


def _agreed(values: list[_T]) -> _T | None:
    return values[0] if values and all(value == values[0] for value in values) else None
