"""A tool of one's own: converts between units, so that figures of two pages can be compared."""

from collections.abc import Mapping
from typing import Any

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools import ImageBook, ToolOutput
from opensearch_lightning.types import ErrorKind

# How much one unit is in the first one of its line.
SCALES: list[dict[str, float]] = [
    {"m": 1.0, "km": 1000.0, "cm": 0.01, "ft": 0.3048, "mi": 1609.344},
    {"kg": 1.0, "g": 0.001, "t": 1000.0, "lb": 0.45359237},
    {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
]
UNITS = [unit for scale in SCALES for unit in scale]


class UnitConverter:
    """``convert``: a value in another unit of the same kind."""

    name = "convert"
    backend = "unit_converter"
    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Convert a value to another unit of length, mass or time.",
            "parameters": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "unit": {"type": "string", "enum": UNITS},
                    "to": {"type": "string", "enum": UNITS},
                },
                "required": ["value", "unit", "to"],
            },
        },
    }

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call; the executor has checked the arguments against the schema.

        Raises:
            ToolError: ``invalid_argument``, if the units measure different things.
        """
        value, unit, to = arguments["value"], arguments["unit"], arguments["to"]
        for scale in SCALES:
            if unit in scale and to in scale:
                return ToolOutput(text=f"{value} {unit} = {value * scale[unit] / scale[to]:g} {to}")
        raise ToolError(ErrorKind.INVALID_ARGUMENT, f"{unit} and {to} measure different things.")
