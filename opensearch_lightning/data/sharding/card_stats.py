"""What the rows of a corpus hold, counted row by row and added up over the blocks that processes wrote."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opensearch_lightning.chat import parse_action
from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.errors import DataError
from opensearch_lightning.pictures import open_picture
from opensearch_lightning.types import Task

NO_SINGLE_CALL = "(no single readable action)"


def _numbers() -> "array[int]":
    # 8 bytes each: corpora hold millions of images
    return array("q")


@dataclass(kw_only=True)
class CorpusStats:
    """Counts of rows; tokens are counted where a processor is known, below 0 for rows that cannot be rendered.

    ``calls`` and ``formats`` count by name, ``pixels`` has the area of each image, ``characters`` and ``tokens`` the
    length of each row.
    """

    rows: int = 0
    turns: int = 0
    policy_turns: int = 0
    tool_turns: int = 0
    image_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    pixels: "array[int]" = field(default_factory=_numbers)
    characters: "array[int]" = field(default_factory=_numbers)
    tokens: "array[int]" = field(default_factory=_numbers)

    def add_row(self, row: SFTRow, tokens: int | None) -> None:
        """Count an expert trajectory."""
        speakers = Counter(speaker for speaker, _ in row.conversations)
        self.turns += len(row.conversations)
        self.policy_turns += speakers["gpt"]
        self.tool_turns += speakers["observation"]
        for speaker, text in row.conversations:
            if speaker == "gpt":
                self._add_action(text)
        self._add(sum(len(text) for _, text in row.conversations) + len(row.system or ""), row.images, tokens)

    def add_task(self, task: Task) -> None:
        """Count a question."""
        self._add(len(task.question), task.images, None)

    def to_json(self) -> dict[str, Any]:
        """As JSON; :meth:`merge` reads it."""
        return {
            name: list(value) if isinstance(value, array) else dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add what :meth:`to_json` of another gave."""
        for name, value in other.items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            elif isinstance(mine, array):
                mine.extend(value)
            else:
                setattr(self, name, mine + value)

    def _add_action(self, text: str) -> None:
        action = parse_action(text)
        if action.kind == "tool_call":
            self.calls[str(action.name)] += 1
        elif action.kind == "error":
            self.calls[NO_SINGLE_CALL] += 1

    def _add(self, characters: int, images: tuple[bytes, ...], tokens: int | None) -> None:
        self.rows += 1
        self.characters.append(characters)
        if tokens is not None:
            self.tokens.append(tokens)
        for encoded in images:
            self.image_bytes += len(encoded)
            try:
                head = open_picture(encoded)
            except DataError:
                self.formats["unreadable"] += 1
                continue
            self.formats[str(head.format)] += 1
            self.pixels.append(head.width * head.height)
