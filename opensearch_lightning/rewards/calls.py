"""What a step called, under the names that tools and arguments have here."""

from collections.abc import Mapping
from typing import Any

from opensearch_lightning.tools.schemas import ARGUMENT_ALIASES, TOOL_ALIASES
from opensearch_lightning.types import Step


def called_tool(step: Step) -> str | None:
    """Canonical name of the tool that a step called; the one it wrote where no tool goes by it."""
    if step.action.kind != "tool_call":
        return None
    named = step.result.tool if step.result is not None else None
    return named or TOOL_ALIASES.get(step.action.name or "", step.action.name)


def called_arguments(step: Step) -> Mapping[str, Any]:
    """Arguments of a call, aliases of their names replaced."""
    aliases = ARGUMENT_ALIASES.get(called_tool(step) or "", {})
    return {aliases.get(name, name): value for name, value in (step.action.arguments or {}).items()}
