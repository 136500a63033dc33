"""One SFT record of any accepted form as a row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.data.sources.calls import call_turn, called_text, has_calls
from opensearch_lightning.data.sources.content import NEXT, Content, Slot, read_content
from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.data.sources.values import as_json, encodable, record_id, shown

_CALLS = "function_call"
_SPEAKERS = {
    "human": "human",
    "user": "human",
    "gpt": "gpt",
    "assistant": "gpt",
    _CALLS: "gpt",
    "observation": "observation",
    "tool": "observation",
    "function": "observation",
    "function_response": "observation",
    "system": "system",
    "developer": "system",
}
_LISTS = ("conversations", "messages")


@dataclass(frozen=True, kw_only=True)
class _Turn:
    speaker: str
    content: Content


def parse_sft(record: Any, *, name: str, images: ImageStore) -> SFTRow:
    """Check one conversation and load its images.

    Accepted are turns as ``from``/``value`` or ``role``/``content`` under ``conversations`` or ``messages``, contents
    as text or as a list of parts, images in the parts or in a column, calls as text or as structured fields (written
    as :func:`~opensearch_lightning.chat.format_action` does), and the system prompt as the first turn or as a column.
    Several observations in a row are the results of one turn and are kept. Placeholders count in human and
    observation turns only: in an assistant's text they are text. An assistant's text is never changed.

    Args:
        record: the raw record.
        name: id of the row when the record has none.
        images: where its images are found.

    Raises:
        UnusableRow: with the reason.
    """
    if not isinstance(record, Mapping):
        raise UnusableRow(DropReason.BAD_RECORD, f"a row is an object, got {type(record).__name__}.")
    turns = [_turn(turn) for turn in _turns_of(record)]
    leading = [turn for turn in turns[:1] if turn.speaker == "system"]
    turns = turns[len(leading) :]
    _check_order([turn.speaker for turn in turns])
    if any(turn.speaker == "gpt" and not turn.content.text.strip() for turn in turns):
        raise UnusableRow(DropReason.EMPTY_POLICY_TURN, "a gpt turn is empty.")
    slots = [slot for turn in turns for slot in turn.content.slots]
    sources = _in_order(slots, _column(record.get("images"), record.get("image")))
    system = _system(leading[0].content if leading else None, record.get("system"))
    tools = _tools(record.get("tools"))
    return SFTRow(
        id=record_id(record) or name,
        conversations=tuple((turn.speaker, turn.content.text) for turn in turns),
        images=tuple(map(images.load, sources)),
        system=system,
        tools=tools,
    )


def _turns_of(record: Mapping[str, Any]) -> Sequence[Any]:
    found = next((record[key] for key in _LISTS if record.get(key) is not None), None)
    if isinstance(found, Mapping) and found and all(isinstance(column, list) for column in found.values()):
        # A list of objects, as some writers of Parquet store it: an object of lists.
        columns = list(found.values())
        if len({len(column) for column in columns}) == 1:
            found = [dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(found, list | tuple):
        raise UnusableRow(
            DropReason.BAD_RECORD, f"a row has a list of turns under {' or '.join(_LISTS)}, got {shown(found)}."
        )
    return found


def _turn(turn: Any) -> _Turn:
    if not isinstance(turn, Mapping):
        raise UnusableRow(DropReason.BAD_RECORD, f"a turn is an object, got {shown(turn)}.")
    role = turn.get("from") if turn.get("from") is not None else turn.get("role")
    speaker = _SPEAKERS.get(role) if isinstance(role, str) else None
    if speaker is None:
        raise UnusableRow(DropReason.UNKNOWN_ROLE, f"a turn is from {shown(role)}, not one of {', '.join(_SPEAKERS)}.")
    raw = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if role == _CALLS:
        return _Turn(speaker=speaker, content=Content(text=encodable("turn", call_turn(raw))))
    if raw is None and has_calls(turn):
        raw = ""
    content = read_content(raw, takes_images=speaker in ("human", "observation"))
    if speaker == "gpt":
        content = Content(text=called_text(turn, content.text))
    encodable("turn", content.text)
    return _Turn(speaker=speaker, content=content)


def _in_order(slots: Sequence[Slot], column: Sequence[Any]) -> list[Any]:
    """What each placeholder stands for; every image of the column must be used."""
    used: set[int] = set()
    sources: list[Any] = []
    following = 0
    for slot in slots:
        if slot.index is None and slot is not NEXT:
            sources.append(slot.value)
            continue
        at = following if slot.index is None else slot.index
        following += slot.index is None
        if not 0 <= at < len(column):
            break
        used.add(at)
        sources.append(column[at])
    if len(sources) < len(slots) or len(used) < len(column):
        raise UnusableRow(
            DropReason.IMAGE_COUNT,
            f"{len(slots)} placeholders and image parts do not fit the {len(column)} images of the row.",
        )
    return sources


def _column(images: Any, image: Any) -> Sequence[Any]:
    if images is None:
        return [] if image is None else [image]
    if not isinstance(images, list | tuple):
        raise UnusableRow(DropReason.BAD_RECORD, f"images are a list, got {type(images).__name__}.")
    return images


def _system(leading: Content | None, column: Any) -> str | None:
    if column is not None and not isinstance(column, str):
        raise UnusableRow(DropReason.BAD_RECORD, f"a system prompt is a text, got {type(column).__name__}.")
    told = leading.text if leading is not None else ""
    if column and told and column != told:
        raise UnusableRow(
            DropReason.TWO_SYSTEM_PROMPTS,
            f"the first turn is a system prompt ({shown(told)}) and the column holds another ({shown(column)}).",
        )
    system = column or told
    return encodable("system prompt", system) if system else None


def _check_order(speakers: Sequence[str]) -> None:
    if "gpt" not in speakers:
        raise UnusableRow(DropReason.NO_POLICY_TURN, "no gpt turn.")
    if speakers[0] != "human":
        raise UnusableRow(DropReason.TURN_ORDER, f"the first turn is from {speakers[0]}, not human.")
    for before, after in pairwise(speakers):
        follows = {before, after} != {"human", "observation"} and "system" not in (before, after)
        if not follows or (before == after and after != "observation"):
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
    if as_json(schemas) is None:
        raise UnusableRow(DropReason.BAD_TOOLS, f"tools cannot be stored as JSON: {shown(schemas)}.")
    return tuple(schemas)
