"""JSON that can stand inside an HTML page."""

from __future__ import annotations

import json
from typing import Any


def page_json(value: Any) -> str:
    """JSON of ``value`` for a script element: no markup character in it, and nothing outside ASCII.

    Raises:
        ValueError: for NaN and infinite numbers, which browsers do not read.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
