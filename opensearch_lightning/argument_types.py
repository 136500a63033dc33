"""Values of a configuration against the annotations of what they are given to, before anything is built."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object

from opensearch_lightning.errors import ConfigurationError

PACKAGE = "opensearch_lightning"

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def check_types(name: str, node: Any) -> None:
    """Refuse plain values that cannot be what the parameters of this package's own parts are declared to be.

    Only parameters declared as numbers, truth values, texts, paths, lists and mappings of these, or nothing, are
    looked at; so are the nodes inside ``node``.

    Args:
        name: dotted name of the node, for messages.
        node: any part of a plain configuration.

    Raises:
        ConfigurationError: a value is of another type; the message names the setting and what it takes.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            check_types(f"{name}[{index}]", item)
    if not isinstance(node, Mapping):
        return
    declared = _declared(node.get("_target_"))
    for key, value in node.items():
        if key in declared:
            _check(f"{name}.{key}", value, declared[key])
        check_types(f"{name}.{key}", value)


def _declared(target: Any) -> dict[str, Any]:
    """Annotations of a target's parameters; those that cannot be resolved are left out."""
    if not isinstance(target, str) or not target.startswith(f"{PACKAGE}."):
        return {}
    try:
        found = get_object(target)
    except (ImportError, ValueError):
        # there is no such target, which building it says with its name
        return {}
    function: Any = found.__init__ if inspect.isclass(found) else inspect.unwrap(found)
    function = getattr(function, "__func__", function)
    hints: dict[str, Any] = {}
    for key, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={key: annotation})
        try:
            hints |= get_type_hints(alone, globalns=getattr(function, "__globals__", {}))
        except (NameError, TypeError, AttributeError):
            continue
    return hints


def _check(name: str, value: Any, hint: Any) -> None:
    if isinstance(value, Mapping) and "_target_" in value:
        return
    choices = _alternatives(hint)
    words = [_word(choice) for choice in choices]
    if None in words or any(_fits(value, choice) for choice in choices):
        return
    shown = "null" if value is None else repr(value)
    raise ConfigurationError(f"{name} is {shown}; set {' or '.join(dict.fromkeys(filter(None, words)))}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _word(hint: Any) -> str | None:
    """What a declared type is to a user; ``None``: nothing that is judged here."""
    if hint is type(None):
        return "null"
    if hint in _WORDS:
        return _WORDS[hint]
    origin = get_origin(hint)
    if not inspect.isclass(origin):
        return None
    if issubclass(origin, Mapping):
        return "a mapping"
    return "a list, as [a, b]" if issubclass(origin, Collection) else None


def _fits(value: Any, hint: Any) -> bool:
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if hint is str:
        # A text may look like a number: name=3.
        return isinstance(value, str | int | float)
    if hint is Path:
        return isinstance(value, str | Path)
    return isinstance(value, Mapping if issubclass(get_origin(hint), Mapping) else list | tuple)
