"""Structured tool calls as the text that the policy learns to write."""

import json
from collections.abc import Mapping
from typing import Any

from opensearch_lightning.chat import format_action
from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.sources.values import shown
from opensearch_lightning.errors import RenderError

_THINK, _THINK_END = "<think>", "</think>"
_CALL = "<tool_call>"
_REASONING = ("reasoning_content", "reasoning")


def has_calls(turn: Mapping[str, Any]) -> bool:
    """Whether a turn brings calls as fields."""
    return bool(turn.get("tool_calls") or turn.get("function_call"))


def called_text(turn: Mapping[str, Any], text: str) -> str:
    """Text of an assistant's turn: its reasoning, its text, its calls, as far as it has them as fields.

    Without such fields it is ``text`` itself, untouched. No think block is written for reasoning that is blank.

    Raises:
        UnusableRow: a call that cannot be written, or reasoning or calls that the text has as well.
    """
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), "")
    if not isinstance(reasoning, str):
        raise UnusableRow(DropReason.BAD_RECORD, f"reasoning is a text, got {shown(reasoning)}.")
    thinks = bool(reasoning.strip())
    if thinks and _THINK in text:
        if reasoning.strip() not in text:
            raise UnusableRow(DropReason.BAD_RECORD, "a turn has a think block in its text and other reasoning beside.")
        thinks = False
    if not thinks and not has_calls(turn):
        return text
    if thinks and (_THINK in reasoning or _THINK_END in reasoning):
        raise UnusableRow(DropReason.BAD_RECORD, "reasoning holds the tag of a think block.")
    if has_calls(turn) and _CALL in text:
        raise UnusableRow(DropReason.BAD_CALL, "a turn has a call in its text and others beside.")
    blocks = [f"{_THINK}{reasoning}{_THINK_END}"] if thinks else []
    blocks += [text] if text.strip() else []
    blocks += [_written(call) for call in _listed(turn)]
    return "\n".join(blocks)


def call_turn(value: Any) -> str:
    """Text of a ``function_call`` turn: its value is a call or a list of calls as JSON, behind a think block or none.

    Raises:
        UnusableRow: it is none.
    """
    think = ""
    if isinstance(value, str):
        if value.lstrip().startswith(_THINK) and _THINK_END in value:
            think, value = value.lstrip().removeprefix(_THINK).split(_THINK_END, maxsplit=1)
        value = _from_json(value)
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        raise UnusableRow(DropReason.BAD_CALL, "a function_call turn holds no call.")
    blocks = [f"{_THINK}{think}{_THINK_END}"] if think.strip() else []
    return "\n".join([*blocks, *map(_written, calls)])


def _listed(turn: Mapping[str, Any]) -> list[Any]:
    calls = turn.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _from_json(calls)
    if not isinstance(calls, list | tuple):
        raise UnusableRow(DropReason.BAD_CALL, f"tool_calls are a list, got {shown(calls)}.")
    single = turn.get("function_call")
    return [*calls, single] if single else list(calls)


def _written(call: Any) -> str:
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        call = call["function"]
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
        raise UnusableRow(DropReason.BAD_CALL, f"a tool call has a name and arguments, got {shown(call)}.")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments) if arguments.strip() else {}
    elif isinstance(arguments, Mapping):
        # Parquet gives each call the arguments of every other, as nulls.
        arguments = {key: value for key, value in arguments.items() if value is not None}
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise UnusableRow(
            DropReason.BAD_CALL, f"the arguments of {call['name']} are an object, got {shown(arguments)}."
        )
    try:
        return format_action(None, call=(call["name"], arguments))
    except RenderError as error:
        raise UnusableRow(DropReason.BAD_CALL, f"a tool call cannot be written: {shown(str(error))}.") from error


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRow(DropReason.BAD_CALL, f"a tool call is no JSON: {shown(text)}.") from error
