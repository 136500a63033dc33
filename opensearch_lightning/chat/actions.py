"""One policy turn as text: reading what it asks for, and writing it in the canonical form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from opensearch_lightning.chat.tokens import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from opensearch_lightning.errors import RenderError
from opensearch_lightning.types import Action, ErrorKind

RESPONSE = "<response>"
RESPONSE_END = "</response>"

_MALFORMED = Action(kind="error", error=ErrorKind.MALFORMED_CALL)
_CALL_KEYS = {"name", "arguments"}
# Far more than any tool takes, and far less than what the JSON encoder or a reader of trajectories can bear.
_MAX_NESTING = 32
_OPENING_TAG = re.compile("|".join(map(re.escape, (THINK, TOOL_CALL, RESPONSE))))
_SPACE = re.compile(r"\s*")


class CallLike(Protocol):
    """Anything with the name and the arguments of a tool call, such as :class:`~opensearch_lightning.types.Action`."""

    @property
    def name(self) -> str | None:
        """Wire name of the tool."""

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """Its arguments, as JSON values."""


@dataclass(frozen=True)
class _Scan:
    """What stands in a text: actions read or refused, think blocks, and whether there is anything else.

    Reading ends behind the second action: no text with two is carried out.
    """

    actions: list[Action]
    n_thinks: int
    first_is_think: bool
    has_stray_text: bool


def parse_action(text: str) -> Action:
    """Read the one action of a policy turn.

    The surface form (recipe, section 1) is one ``<think>…</think>`` followed by one ``<tool_call>{"name": …,
    "arguments": {…}}</tool_call>`` or one ``<response>…</response>``, with whitespace around and between. A text that
    is not well formed but holds exactly one readable call or response is still that action. Blocks are read from left
    to right: tags inside a think block, inside a response or inside a JSON string are text, and what follows an
    unclosed ``<think>`` or ``<response>`` belongs to it.

    Args:
        text: the turn without its ``<|im_end|>``.

    Returns:
        The action. ``kind == "error"`` with ``no_action`` when there is none, ``several_actions`` when there is more
        than one (readable or not), ``malformed_call`` when the only one is a call that is not one strict JSON object
        with a string ``name`` and an object ``arguments``, is nested deeper than 32 levels (its own braces are the
        first), or is not closed. Whether the tool exists and its arguments fit is the executor's to say. Takes time
        linear in the length of the text.

    Example:
        >>> parse_action('<think>a map</think><response> Lyon </response>').response
        'Lyon'
    """
    scan = _scan(text)
    if not scan.actions:
        return Action(kind="error", error=ErrorKind.NO_ACTION)
    if len(scan.actions) > 1:
        return Action(kind="error", error=ErrorKind.SEVERAL_ACTIONS)
    action = scan.actions[0]
    if action.kind == "error":
        return action
    well_formed = action.well_formed and scan.n_thinks == 1 and scan.first_is_think and not scan.has_stray_text
    return Action(
        kind=action.kind,
        name=action.name,
        arguments=action.arguments,
        response=action.response,
        well_formed=well_formed,
    )


def format_action(
    think: str | None,
    *,
    call: CallLike | tuple[str, Mapping[str, Any]] | None = None,
    response: str | None = None,
) -> str:
    """Write an action in the canonical form, which :func:`parse_action` reads back.

    Args:
        think: the reasoning, or ``None`` for a turn without a think block (readable, but not well formed).
        call: a tool call, as ``(name, arguments)`` or anything with these two attributes.
        response: the final answer. Exactly one of ``call`` and ``response`` must be given.

    Returns:
        The text of the turn, without ``<|im_end|>``; a call as Qwen3-VL's chat template writes it.

    Raises:
        RenderError: if not exactly one action is given, or a part would not be read back as it was given.
    """
    if (call is None) == (response is None):
        raise RenderError(
            f"an action is one call or one response; got call={call!r} and response={response!r}: give exactly one"
        )
    blocks = [] if think is None else [f"{THINK}{_checked('think', think, THINK, THINK_END)}{THINK_END}"]
    if call is not None:
        name, arguments = call if isinstance(call, tuple) else (call.name, call.arguments)
        blocks.append(f"{TOOL_CALL}\n{_call_json(name, arguments)}\n{TOOL_CALL_END}")
    elif response is not None:
        blocks.append(f"{RESPONSE}{_checked('response', response, RESPONSE_END)}{RESPONSE_END}")
    return "\n".join(blocks)


def _scan(text: str) -> _Scan:
    actions: list[Action] = []
    n_thinks, first_is_think, stray = 0, False, False
    position = 0
    while len(actions) < 2 and (opened := _OPENING_TAG.search(text, position)) is not None:
        tag, start, body = opened[0], opened.start(), opened.end()
        stray = stray or bool(text[position:start].strip())
        if tag == TOOL_CALL:
            action, position = _read_call(text, body)
            actions.append(action)
            continue
        closer = THINK_END if tag == THINK else RESPONSE_END
        end = text.find(closer, body)
        if end < 0:
            return _Scan(actions, n_thinks, first_is_think, has_stray_text=True)
        position = end + len(closer)
        if tag == THINK:
            n_thinks += text.count(THINK, start, end)
            first_is_think = first_is_think or not actions
        else:
            actions.append(Action(kind="response", response=text[body:end].strip(), well_formed=True))
    return _Scan(actions, n_thinks, first_is_think, stray or bool(text[position:].strip()))


def _read_call(text: str, body: int) -> tuple[Action, int]:
    """The call whose tag ends at ``body``, and the position behind it. JSON decides where the call ends, not a tag."""
    try:
        value, end = _JSON.raw_decode(text, _behind_space(text, body))
    except (ValueError, RecursionError):
        return _MALFORMED, _behind_closer(text, body)
    closer = _behind_space(text, end)
    if not text.startswith(TOOL_CALL_END, closer):
        return _MALFORMED, _behind_closer(text, end)
    return _call_of(value), closer + len(TOOL_CALL_END)


def _behind_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def _behind_closer(text: str, position: int) -> int:
    end = text.find(TOOL_CALL_END, position)
    return len(text) if end < 0 else end + len(TOOL_CALL_END)


def _call_of(value: object) -> Action:
    if not isinstance(value, dict):
        return _MALFORMED
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict) or not _is_passable(value):
        return _MALFORMED
    return Action(kind="tool_call", name=name, arguments=arguments, well_formed=value.keys() == _CALL_KEYS)


def _is_passable(value: object) -> bool:
    r"""Whether a JSON value is nested at most 32 levels deep and every string in it can be encoded.

    JSON may escape half a surrogate pair (``"\ud800"``). No recursion: how deep the value goes is the policy's choice.
    """
    waiting: list[tuple[object, int]] = [(value, 1)]
    while waiting:
        inner, level = waiting.pop()
        if isinstance(inner, str) and not _is_unicode(inner):
            return False
        if isinstance(inner, dict | list):
            if level > _MAX_NESTING:
                return False
            parts = [*inner.keys(), *inner.values()] if isinstance(inner, dict) else inner
            waiting += [(part, level + 1) for part in parts]
    return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _call_json(name: str | None, arguments: Mapping[str, Any] | None) -> str:
    if name is None or arguments is None:
        raise RenderError(f"a tool call needs a name and arguments; got name={name!r}, arguments={arguments!r}")
    try:
        encoded = json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RenderError(f"the arguments of {name} cannot be written as JSON ({error}): {arguments!r}") from error
    except RecursionError as error:
        raise RenderError(
            f"the arguments of {name} are nested too deep; at most {_MAX_NESTING} levels are read"
        ) from error
    if not _is_passable({"name": name, "arguments": json.loads(encoded)}):
        raise RenderError(
            f"the call of {name} is nested deeper than {_MAX_NESTING} levels or holds half a surrogate pair, and would "
            "not be read back; make it flatter, or mend its text"
        )
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {encoded}}}'


def _checked(part: str, text: str, *tags: str) -> str:
    found = [tag for tag in tags if tag in text]
    if found:
        raise RenderError(
            f"the {part} holds {found[0]}, which would be read as its end or another: {text!r}; take it out"
        )
    return text
