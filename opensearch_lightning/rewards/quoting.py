"""Foreign text in a prompt, so that it stays what it is: data."""

import json
from collections.abc import Mapping
from typing import Any

from opensearch_lightning.tools.formatting import encodable


def quoted(record: Mapping[str, Any]) -> str:
    r"""``record`` as one JSON object that no string in it can leave.

    JSON's own quoting keeps a string inside its quotation marks; ``<`` is written ``\u003c``, so that nothing in it
    reads as a control token (``<|im_end|>``, ``</s>``, ``<image>``) to a server's tokenizer.
    """
    return encodable(json.dumps(record, ensure_ascii=False, indent=1)).replace("<", "\\u003c")


def cut(text: str, most: int) -> str:
    """The first ``most`` characters of ``text``, and how many there are beyond."""
    return text if len(text) <= most else f"{text[:most]} [+{len(text) - most} characters]"
