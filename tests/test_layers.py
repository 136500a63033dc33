"""The layer rule: imports go down only, never sideways between packages of level 3, and nothing imports callbacks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "opensearch_lightning"
CALLBACKS = 4
TOP = 5
LEVELS = {
    "types": 0,
    "vllm_worker": 0,
    "errors": 0,
    "pictures": 0,
    "paths": 0,
    "algorithms": 0,
    "chat": 1,
    "models": 1,
    "graph": 1,
    "strategies": 1,
    "tools": 1,
    "rewards": 1,
    "rollout": 2,
    "data": 2,
    "modules": 3,
    "curation": 3,
    "evaluation": 3,
    "dashboards": 3,
    "world": 3,
    "callbacks": CALLBACKS,
    "ablation": TOP,
    "conf": TOP,
    "cli": TOP,
    "composition": TOP,
    "argument_types": TOP,
    "evaluate": TOP,
    "export": TOP,
    "launch": TOP,
    "planning": TOP,
    "quickstart": TOP,
    "tools_command": TOP,
}
OPTIONAL = ("vllm", "deepspeed", "mcp", "open_clip", "openai", "peft", "rapid_layout", "trafilatura")


def part_of(module: str) -> str | None:
    """Second component of a dotted name of this package: the part whose level counts."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else None


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a file imports, also inside functions and under TYPE_CHECKING."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What one file does against the layer rule, one line of text each."""
    here = part_of(module)
    if here is None:
        return []
    found = []
    for line, name in imported_modules(source, module, is_package):
        there = part_of(name)
        if name.split(".")[0] in ("callbacks", "conf", "tests"):
            found.append(f"{module}:{line} imports {name} by a name that exists only in a checkout")
        if there is None or there not in LEVELS or there == here:
            continue
        level_here, level_there = LEVELS[here], LEVELS[there]
        if level_there > level_here:
            found.append(f"{module}:{line} (level {level_here}) imports {name} (level {level_there})")
        elif level_there == level_here == 3:
            found.append(f"{module}:{line} imports {name}: packages of level 3 never import each other")
        elif there == "callbacks" and level_here != TOP:
            found.append(f"{module}:{line} imports {name}: nothing imports callbacks")
    return found


def package_files() -> list[tuple[Path, str, bool]]:
    """Every Python file of the package once: path, dotted name, whether it is a package's ``__init__``."""
    files = []
    for top, _, names in os.walk(ROOT / PACKAGE, followlinks=True):
        for name in sorted(names):
            path = Path(top, name)
            if path.suffix == ".py":
                dotted = path.relative_to(ROOT).with_suffix("").parts
                is_package = dotted[-1] == "__init__"
                files.append((path, ".".join(dotted[:-1] if is_package else dotted), is_package))
    return sorted(files)


def test_imports_go_down() -> None:
    files = package_files()
    assert any(module == f"{PACKAGE}.callbacks" for _, module, _ in files), "the link to callbacks/ is not followed"
    found = [line for path, module, init in files for line in violations(path.read_text(), module, init)]
    assert not found, "\n".join(found)


def test_every_part_has_a_level() -> None:
    parts = {part for _, module, _ in package_files() if (part := part_of(module))}
    assert parts <= LEVELS.keys(), f"give {sorted(parts - LEVELS.keys())} a level in this file"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("opensearch_lightning.tools.executor", "import opensearch_lightning.rollout", "(level 1) imports"),
        ("opensearch_lightning.tools.executor", "from opensearch_lightning import rollout", "(level 1) imports"),
        ("opensearch_lightning.tools", "from ..rollout import loop", "(level 1) imports"),
        ("opensearch_lightning.modules.grpo", "from opensearch_lightning.world import World", "level 3 never"),
        (
            "opensearch_lightning.data.rl",
            "def f():\n    from opensearch_lightning import callbacks",
            "(level 2) imports",
        ),
        ("opensearch_lightning.launch", "from callbacks import RolloutGeneration", "only in a checkout"),
    ],
)
def test_rule_finds_what_it_forbids(module: str, source: str, expected: str) -> None:
    # "opensearch_lightning.tools" stands for the __init__ of that package: there, ".." is the package itself.
    found = violations(source, module, is_package=module.count(".") == 1 and "." in source.split()[1][:2])
    assert len(found) == 1
    assert expected in found[0]


def test_rule_allows_imports_down_and_inside() -> None:
    source = "import torch\nfrom opensearch_lightning.types import Task\nfrom opensearch_lightning.modules import optim"
    assert violations(source, "opensearch_lightning.modules.grpo") == []


def test_everything_imports_without_optional_packages_or_gpu() -> None:
    """One process, with the optional packages hidden and no device visible, imports every module of the package."""
    modules = [module for _, module, _ in package_files()]
    code = f"""
import importlib, sys

class Hiding:
    # as if they were not installed: other packages look for some of these, too
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {OPTIONAL!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
failed = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
print("\\n".join(failed))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
