"""ShareGPT conversations with tool observations, as the SearchVL-SFT data holds them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from opensearch_lightning.chat import AssistantTurn, ObservationTurn, Part, Turn, UserTurn
from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.images import load_image
from opensearch_lightning.errors import DataError

PLACEHOLDER = "<image>"
_SPEAKERS = ("human", "gpt", "observation")


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


def parse_sharegpt(record: Any, *, name: str, image_root: Path | None = None) -> SFTRow:
    """Check one ShareGPT record and load its images.

    Several observations in a row are the results of one turn and are kept. Placeholders count in human and
    observation turns only: in an assistant's text they are text.

    Args:
        record: mapping with ``conversations`` and, optionally, ``id``, ``images``, ``system`` and ``tools`` (a list
            of schemas or its JSON).
        name: id of the row when the record has none.
        image_root: folder of image paths.

    Raises:
        UnusableRow: with the reason.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("conversations"), Sequence):
        raise UnusableRow(DropReason.BAD_RECORD, "a row is an object with a list of conversations.")
    conversations = tuple(map(_speaker_and_text, record["conversations"]))
    _check_order([speaker for speaker, _ in conversations])
    if any(speaker == "gpt" and not text.strip() for speaker, text in conversations):
        raise UnusableRow(DropReason.EMPTY_POLICY_TURN, "a gpt turn is empty.")
    sources = _images(record.get("images"))
    placeholders = sum(text.count(PLACEHOLDER) for speaker, text in conversations if speaker != "gpt")
    if placeholders != len(sources):
        raise UnusableRow(DropReason.IMAGE_COUNT, f"{placeholders} placeholders for {len(sources)} images.")
    return SFTRow(
        id=_encodable("id", str(record.get("id", name))),
        conversations=conversations,
        images=tuple(load_image(source, image_root) for source in sources),
        system=_system(record.get("system")),
        tools=_tools(record.get("tools")),
    )


def _speaker_and_text(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise UnusableRow(DropReason.BAD_RECORD, f"a turn has 'from' and a text 'value', got {turn!r:.80}.")
    if turn.get("from") not in _SPEAKERS:
        raise UnusableRow(DropReason.UNKNOWN_ROLE, f"a turn is from {turn.get('from')!r}, not one of {_SPEAKERS}.")
    return turn["from"], _encodable("turn", turn["value"])


def _encodable(part: str, text: str) -> str:
    """``text`` itself, if it can be stored and tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow(DropReason.BAD_TEXT, f"the {part} holds half a surrogate pair: {error}.") from error
    return text


def _images(images: Any) -> Sequence[Any]:
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        raise UnusableRow(DropReason.BAD_RECORD, f"images are a list, got {type(images).__name__}.")
    return images


def _system(system: Any) -> str | None:
    if system is not None and not isinstance(system, str):
        raise UnusableRow(DropReason.BAD_RECORD, f"a system prompt is a text, got {type(system).__name__}.")
    return _encodable("system prompt", system) if system else None


def _check_order(speakers: Sequence[str]) -> None:
    if "gpt" not in speakers:
        raise UnusableRow(DropReason.NO_POLICY_TURN, "no gpt turn.")
    if speakers[0] != "human":
        raise UnusableRow(DropReason.TURN_ORDER, f"the first turn is from {speakers[0]}, not human.")
    for before, after in pairwise(speakers):
        if (before == after and after != "observation") or {before, after} == {"human", "observation"}:
            raise UnusableRow(DropReason.TURN_ORDER, f"a turn from {before} is followed by one from {after}.")
    if speakers[-1] != "gpt":
        raise UnusableRow(DropReason.ENDS_WITHOUT_POLICY, f"the last turn is from {speakers[-1]}, not gpt.")


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    try:
        schemas = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or []
    except (ValueError, RecursionError) as error:
        raise UnusableRow(DropReason.BAD_TOOLS, f"tools are no JSON: {error}.") from error
    if not isinstance(schemas, list) or not all(isinstance(schema, Mapping) for schema in schemas):
        raise UnusableRow(DropReason.BAD_TOOLS, f"tools are a list of schemas, got {type(schemas).__name__}.")
    try:
        json.dumps(schemas, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableRow(DropReason.BAD_TOOLS, f"tools cannot be stored as JSON: {error}.") from error
    return tuple(schemas)


def read_sharegpt(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Records of a JSON file (a list) or a JSON Lines file, each with its name ``file[index]``.

    Raises:
        DataError: the file cannot be read, or is neither.
    """
    path = Path(path)
    for index, record in enumerate(_records(path)):
        yield f"{path.name}[{index}]", record


def _records(path: Path) -> Iterable[Any]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
            return
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(records, list):
        raise DataError(f"{path} holds a {type(records).__name__}, not a list of rows; use .jsonl for JSON Lines.")
    yield from records
