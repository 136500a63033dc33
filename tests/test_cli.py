"""The ``opensearch`` command."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opensearch_lightning import __version__
from opensearch_lightning.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_module_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[name][0])
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: opensearch {name}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tran"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no command 'tran'; did you mean 'train'?")


def test_errors_on_purpose_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "nowhere" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["world", "{tmp}/world", "--workers", "0"], "workers=0: set 1 thread or more"),
        (["world", "{tmp}/file/world"], "{tmp}/file is a file; choose another path"),
        (["world", "/proc/none/world"], "out=/proc/none/world cannot be written (No such file or directory)"),
        (["report", "{tmp}", "--out", "{tmp}"], "--out={tmp} is a folder; give the name of a file in it"),
        (["report", "{tmp}", "--out", "{tmp}/file/a.html"], "{tmp}/file is a file; choose another path"),
        (["report", "{tmp}", "--evaluation", "{tmp}/file"], "The evaluation file {tmp}/file cannot be used"),
    ],
)
def test_arguments_that_cannot_work_are_one_line_and_write_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no JSON")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message.format(tmp=tmp_path) in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_options_may_stand_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "seed=1", "--print", "trainer.max_steps=7"]) == 0
    out = capsys.readouterr().out
    assert "seed: 1\n" in out
    assert "max_steps: 7\n" in out


def test_every_command_that_texts_name_exists() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    for folder in ("opensearch_lightning", "conf", "callbacks"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    named = {
        (match[1], str(path.relative_to(ROOT)))
        for path in texts
        for match in re.finditer(r"(?:`|^|/)opensearch ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert named
    assert {(name, path) for name, path in named if name not in COMMANDS} == set()


def test_help_needs_no_torch() -> None:
    code = "import sys; from opensearch_lightning.cli import main; main([]); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
