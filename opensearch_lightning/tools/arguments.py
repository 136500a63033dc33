"""Checks the arguments of a call against its tool's schema: exact types, nothing guessed, nothing converted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.schemas import IMAGE_ID
from opensearch_lightning.types import ErrorKind

# NaN and infinity fail the comparison with it as well.
_LARGEST = 10**12


@dataclass(frozen=True, kw_only=True)
class CheckedArguments:
    """Arguments under their canonical names with defaults filled in; ``ignored`` are names the tool does not have."""

    values: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


def check_arguments(
    schema: Mapping[str, Any], arguments: Mapping[str, Any], aliases: Mapping[str, str], images: ImageBook
) -> CheckedArguments:
    """Arguments as the tool may use them.

    Whole numbers may be written as ``3`` or ``3.0``; a number in quotes, a boolean, ``null``, NaN or infinity is no
    number.

    Args:
        schema: function schema of the tool.
        arguments: as the policy wrote them.
        aliases: other names of arguments, to the schema's own.
        images: the images that ``image-id`` arguments may name.

    Raises:
        ToolError: ``invalid_argument`` or ``unknown_image``, naming the argument.
    """
    parameters = schema["function"]["parameters"]
    properties: Mapping[str, Mapping[str, Any]] = parameters["properties"]
    given = _canonical_names(arguments, properties, aliases)
    for name in parameters.get("required", ()):
        if name not in given:
            raise _invalid(f"{name} is missing.")
    values = {}
    for name, rule in properties.items():
        if name in given:
            values[name] = _check(name, given[name], rule)
        elif "default" in rule:
            values[name] = rule["default"]
    for name in image_arguments(schema, values):
        images.get(values[name])
    return CheckedArguments(values=values, ignored=tuple(name for name in given if name not in properties))


def image_arguments(schema: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Names among ``values`` whose value is the name of an image."""
    properties = schema["function"]["parameters"]["properties"]
    return [name for name in values if properties[name].get("format") == IMAGE_ID]


def _invalid(message: str) -> ToolError:
    return ToolError(ErrorKind.INVALID_ARGUMENT, message)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _canonical_names(
    arguments: Mapping[str, Any], properties: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for written, value in arguments.items():
        name = written if written in properties else aliases.get(written, written)
        if name in given and given[name] != value:
            raise _invalid(f"{name} is given twice, as {_shown(given[name])} and {_shown(value)}.")
        given[name] = value
    return given


def _check(name: str, value: Any, rule: Mapping[str, Any]) -> Any:
    kind = rule.get("type")
    if kind in ("number", "integer"):
        return _check_number(name, value, rule, whole=kind == "integer")
    if kind == "boolean":
        if not isinstance(value, bool):
            raise _invalid(f"{name} must be true or false, not {_shown(value)}.")
    elif kind == "string":
        if not isinstance(value, str):
            raise _invalid(f"{name} must be a string, not {_shown(value)}.")
        if len(value.strip()) < rule.get("minLength", 0):
            raise _invalid(f"{name} is empty.")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _invalid(f"{name} holds half a character.")
    if "enum" in rule and value not in rule["enum"]:
        raise _invalid(f"{name} must be one of {_shown(list(rule['enum']))}, not {_shown(value)}.")
    return value


def _check_number(name: str, value: Any, rule: Mapping[str, Any], *, whole: bool) -> int | float:
    wanted = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise _invalid(f"{name} must be {wanted}, not {_shown(value)}.")
    if value == int(value):
        value = int(value)
    elif whole:
        raise _invalid(f"{name} must be {wanted}, not {_shown(value)}.")
    if "minimum" in rule and value < rule["minimum"]:
        raise _invalid(f"{name} must be at least {rule['minimum']}, not {_shown(value)}.")
    if "exclusiveMinimum" in rule and value <= rule["exclusiveMinimum"]:
        raise _invalid(f"{name} must be above {rule['exclusiveMinimum']}, not {_shown(value)}.")
    if "maximum" in rule and value > rule["maximum"]:
        raise _invalid(f"{name} must be at most {rule['maximum']}, not {_shown(value)}.")
    return value
