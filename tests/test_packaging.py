"""The wheel carries every package, callbacks/ and conf/ included, and declares what the code imports."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = "opensearch_lightning"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

DISTRIBUTION = {
    "PIL": "pillow",
    "botocore": "boto3",
    "cv2": "opencv-python-headless",
    "hydra": "hydra-core",
    "open_clip": "open-clip-torch",
}
"""Distributions whose name is not that of the module they bring."""


def package_files() -> list[Path]:
    """Every file of the package on disk, through the links, relative to the repository; no caches."""
    return [
        Path(top, name).relative_to(ROOT)
        for top, _, names in os.walk(ROOT / PACKAGE, followlinks=True)
        for name in names
        if "__pycache__" not in top
    ]


def test_links_are_relative_and_point_to_the_top_level() -> None:
    for name in ("callbacks", "conf"):
        link = ROOT / PACKAGE / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert (ROOT / name / "__init__.py").is_file()


def test_listed_packages_are_those_on_disk() -> None:
    on_disk = {".".join(path.parent.parts) for path in package_files() if path.name == "__init__.py"}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(on_disk)


def test_no_python_file_lies_outside_a_package() -> None:
    folders = {path.parent for path in package_files() if path.suffix == ".py"}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what is in version control, without network."""
    source = tmp_path_factory.mktemp("source")
    for name in (PACKAGE, "callbacks", "conf"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), "."]
    done = subprocess.run([sys.executable, *command], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {path.as_posix() for path in package_files()}
    assert f"{PACKAGE}/conf/train.yaml" in inside
    assert f"{PACKAGE}/callbacks/__init__.py" in inside


def test_unpacked_wheel_composes_and_imports(wheel: Path, tmp_path: Path) -> None:
    """As installed: no checkout on the path, ``opensearch train --print`` finds conf/ inside the package."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": str(tmp_path)
    }
    code = (
        f"import importlib.util as u, {PACKAGE}.cli as cli; print(u.find_spec('{PACKAGE}.callbacks').origin);"
        "raise SystemExit(cli.main(['train', '--print', 'trainer.max_steps=3']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout.splitlines()[0]
    assert "max_steps: 3" in done.stdout


def third_party_imports() -> dict[str, str]:
    """Top-level names that the package imports and that are neither its own nor Python's, with a file of each."""
    found = {}
    for path in package_files():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top != PACKAGE:
                    found[top] = str(path)
    return found


def declared(*extras: str) -> dict[str, Requirement]:
    """What the base install, and the extras given, ask for, by the distribution's name."""
    project = PROJECT["project"]
    optional = project["optional-dependencies"]
    found = {}
    for line in itertools.chain(project["dependencies"], *(optional[name] for name in extras)):
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            found |= declared(*requirement.extras)
        else:
            found[requirement.name.lower()] = requirement
    return found


def test_every_import_is_a_declared_dependency() -> None:
    allowed = declared(*set(PROJECT["project"]["optional-dependencies"]) - {"dev"})
    missing = {
        name: path
        for name, path in third_party_imports().items()
        if DISTRIBUTION.get(name, name).lower().replace("_", "-") not in allowed
    }
    assert not missing


def test_every_base_dependency_is_imported_or_named_in_conf() -> None:
    used = {DISTRIBUTION.get(name, name).lower().replace("_", "-") for name in third_party_imports()}
    in_conf = "\n".join(path.read_text() for path in (ROOT / "conf").rglob("*.yaml"))
    unused = {name for name in declared().keys() - used if name.replace("-", "_") not in in_conf}
    # rapidocr runs its models with onnxruntime, transformers prepares pictures with torchvision; both leave the
    # choice to the one who installs them.
    assert unused <= {"onnxruntime", "torchvision"}


def test_constraints_satisfy_the_ranges() -> None:
    ranges = declared("dev")
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalpha()]
    assert pins
    for pin in pins:
        (version,) = (specifier.version for specifier in pin.specifier)
        assert ranges[pin.name.lower()].specifier.contains(version), f"{pin} is outside {ranges[pin.name.lower()]}"
