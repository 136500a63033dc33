"""One expert trajectory, as the parser makes it and shards hold it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opensearch_lightning.chat import AssistantTurn, ObservationTurn, Part, Turn, UserTurn

PLACEHOLDER = "<image>"


@dataclass(frozen=True, kw_only=True)
class SFTRow:
    """One expert trajectory.

    ``conversations`` are pairs of speaker (``human``, ``gpt``, ``observation``) and text as found; ``images`` are
    encoded files in the order of the ``<image>`` placeholders of human and observation turns; ``system`` is ``None``
    without a system prompt; ``tools`` are the tools' JSON schemas.
    """

    id: str
    conversations: tuple[tuple[str, str], ...]
    images: tuple[bytes, ...] = ()
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    def turns(self) -> list[Turn]:
        """The conversation for the renderer: placeholders replaced by their images; assistant text untouched."""
        images = iter(self.images)
        turns: list[Turn] = []
        for speaker, text in self.conversations:
            if speaker == "gpt":
                turns.append(AssistantTurn(text=text))
                continue
            parts = _parts(text, images)
            turns.append(UserTurn(parts=parts) if speaker == "human" else ObservationTurn(parts=parts))
        return turns


def _parts(text: str, images: Iterator[bytes]) -> list[Part]:
    first, *others = text.split(PLACEHOLDER)
    parts: list[Part] = [first]
    for piece in others:
        parts += [next(images), piece]
    return [part for part in parts if part != ""]
