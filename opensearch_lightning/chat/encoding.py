"""Text to token ids where control tokens come only from whoever writes them as ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from opensearch_lightning.errors import RenderError

Segment = int | str
"""A token id written on purpose, or a run of plain text."""


class SegmentEncoder:
    """Encodes segments with a copy of a tokenizer that knows no added tokens.

    Switching the special tokens off would not do: ``<tool_call>`` and ``<think>`` are ordinary added tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.

    Raises:
        RenderError: if the copy still makes a control token from its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._names: dict[int, str] = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._ids = {name: i for i, name in self._names.items()}
        self._plain = _without_added_tokens(tokenizer.backend_tokenizer)
        for name in self._ids:
            if not self._names.keys().isdisjoint(self._plain.encode(name, add_special_tokens=False).ids):
                raise RenderError(f"the tokenizer makes {name} also without its added tokens: text could forge it")

    @property
    def control_ids(self) -> dict[str, int]:
        """Id of every added token, by its text."""
        return self._ids

    def id_of(self, name: str) -> int:
        """Id of one control token.

        Raises:
            RenderError: if the tokenizer lacks it.
        """
        if name not in self._ids:
            raise RenderError(f"the tokenizer has no token {name}: a Qwen3-VL tokenizer is needed")
        return self._ids[name]

    def split(self, text: str, tags: Sequence[str]) -> list[Segment]:
        """Segments of a text in which these tags, and no other control string, are tokens."""
        parts = re.split("(" + "|".join(map(re.escape, tags)) + ")", text)
        return [self.id_of(part) if part in tags else part for part in parts if part]

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of segments. Neighbouring texts are joined first, as in one whole text."""
        ids: list[int] = []
        run: list[str] = []
        for segment in segments:
            if isinstance(segment, str):
                run.append(segment)
                continue
            ids += self._encode_text(run)
            run.clear()
            ids.append(segment)
        return ids + self._encode_text(run)

    def text_of(self, segments: Iterable[Segment]) -> str:
        """The text that a tokenizer with its added tokens would read."""
        return "".join(segment if isinstance(segment, str) else self._names[segment] for segment in segments)

    def _encode_text(self, run: Sequence[str]) -> list[int]:
        text = "".join(run)
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    description = json.loads(backend.to_str())
    # Truncation and padding are left over from the last call of the tokenizer that this one is copied from.
    description.update(added_tokens=[], truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(description))
