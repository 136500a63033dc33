"""Checks the arguments of a call against its tool's schema: exact types, nothing guessed, nothing converted.

Plain rules are checked here. What else JSON Schema knows (arrays, objects, ``anyOf``, patterns, …) is checked by the
jsonschema package, as far as it is installed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opensearch_lightning.errors import ToolError, one_line
from opensearch_lightning.tools.formatting import encodable
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.schemas import IMAGE_ID
from opensearch_lightning.types import ErrorKind

logger = logging.getLogger(__name__)

# NaN and infinity fail the comparison with it as well.
_LARGEST = 2**63

_PLAIN_TYPES = ("number", "integer", "boolean", "string")
# Keywords that are checked here for values of these types, or that say nothing of the value.
_PLAIN = {"type", "enum", "minimum", "maximum", "exclusiveMinimum", "minLength", "format"} | {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
}  # fmt: skip
_ABOUT_PROPERTIES = _PLAIN | {
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    "$id",
    "$defs",
    "definitions",
}
_SHOWN_RULE = 80


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
    number. Names that the schema does not have are left out, except where it says which others there may be.

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
            values[name] = _check(name, given[name], rule, parameters)
        elif "default" in rule:
            values[name] = rule["default"]
    others = [name for name in given if name not in properties]
    others_rule = parameters.get("additionalProperties", "patternProperties" in parameters)
    if others_rule is not False:
        for name in others:
            _check_encodable(f"The name {_shown(name)}", name)
            rule = others_rule if isinstance(others_rule, Mapping) else {}
            values[name] = _check(name, given[name], rule, parameters)
        others = []
    if not parameters.keys() <= _ABOUT_PROPERTIES:
        _check_with_jsonschema("the call", values, parameters, parameters)
    for name in image_arguments(schema, values):
        images.get(values[name])
    return CheckedArguments(values=values, ignored=tuple(others))


def image_arguments(schema: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Names among ``values`` whose value is the name of an image; one that may be left out may have another default."""
    properties = schema["function"]["parameters"]["properties"]
    return [
        name
        for name, value in values.items()
        if properties.get(name, {}).get("format") == IMAGE_ID and isinstance(value, str)
    ]


def _invalid(message: str) -> ToolError:
    return ToolError(ErrorKind.INVALID_ARGUMENT, message)


def _shown(value: Any, most: int = 40) -> str:
    text = encodable(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= most else text[: most - 3] + "..."


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


def _check(name: str, value: Any, rule: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    kind = rule.get("type")
    if kind in ("number", "integer"):
        value = _check_number(name, value, rule, whole=kind == "integer")
    elif kind == "boolean":
        if not isinstance(value, bool):
            raise _invalid(f"{name} must be true or false, not {_shown(value)}.")
    elif kind == "string":
        _check_string(name, value, rule)
    else:
        _check_encodable(name, value)
    if "enum" in rule and value not in rule["enum"]:
        raise _invalid(f"{name} must be one of {_shown(list(rule['enum']))}, not {_shown(value)}.")
    if kind not in _PLAIN_TYPES or not rule.keys() <= _PLAIN:
        _check_with_jsonschema(name, value, rule, parameters)
    return value


def _check_string(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    if not isinstance(value, str):
        raise _invalid(f"{name} must be a string, not {_shown(value)}.")
    length, least = len(value.strip()), rule.get("minLength", 0)
    if length < least:
        raise _invalid(f"{name} must have {least} characters or more, not {length}." if length else f"{name} is empty.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _invalid(f"{name} holds half a character.")


def _check_encodable(name: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise _invalid(f"{name} holds half a character.") from None
    except ValueError:
        raise _invalid(f"{name} holds NaN or infinity, which are no numbers.") from None
    except RecursionError:
        raise _invalid(f"{name} is nested too deeply.") from None


def _check_with_jsonschema(where: str, value: Any, rule: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Check what the plain rules do not cover; ``parameters`` is the document that ``$ref`` points into."""
    try:
        from jsonschema.exceptions import best_match
        from jsonschema.validators import Draft202012Validator, extend, validator_for
        from referencing import Registry
    except ModuleNotFoundError:
        return
    dialect = validator_for(parameters, default=Draft202012Validator)
    additional = dialect.VALIDATORS["additionalProperties"]

    def without_patterns(validator: Any, rule: Any, value: Any, schema: Mapping[str, Any]) -> Any:
        return () if "patternProperties" in schema else additional(validator, rule, value, schema)

    # No regular expression of a schema is applied to the policy's words: one can take longer than any call may.
    own = {"pattern": _unchecked, "patternProperties": _unchecked, "additionalProperties": without_patterns}
    # An empty registry: what lies outside the document is never fetched.
    validator = extend(dialect, own)(parameters, registry=Registry())
    try:
        error = best_match(validator.evolve(schema=rule).iter_errors(value))
    except Exception as fault:
        # A schema that cannot be applied (an open $ref, a pattern of another dialect) is not the policy's error.
        logger.warning("The rule of %s cannot be checked: %s", where, one_line(fault))
        return
    if error is not None:
        raise _invalid(_described(where, error))


def _unchecked(*_: Any) -> tuple[()]:
    return ()


def _described(where: str, error: Any) -> str:
    """One line on what is wrong where, as the plain rules have it."""
    for step in error.absolute_path:
        where += f"[{step}]" if isinstance(step, int) else f".{str(step)[:40]}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{where} lacks {_shown(missing)}."
    if error.validator == "type":
        kinds = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
        return f"{where} must be of type {' or '.join(kinds)}, not {_shown(error.instance)}."
    rule = _shown({error.validator: error.validator_value}, _SHOWN_RULE)
    return f"{where} must fit {rule}, not {_shown(error.instance)}."


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
    # Old schemas have true or false here.
    if not isinstance(rule.get("exclusiveMinimum", False), bool) and value <= rule["exclusiveMinimum"]:
        raise _invalid(f"{name} must be above {rule['exclusiveMinimum']}, not {_shown(value)}.")
    if "maximum" in rule and value > rule["maximum"]:
        raise _invalid(f"{name} must be at most {rule['maximum']}, not {_shown(value)}.")
    return value
