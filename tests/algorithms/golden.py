"""Golden values, computed apart from the package with NumPy in float64."""

import json
from pathlib import Path
from typing import Any

import torch

TOLERANCES = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text(encoding="utf-8"))
