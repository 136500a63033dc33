"""``opensearch tools check``."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensearch_lightning.cli import main

SECRET = "sk-0123456789abcdef"


def table(out: str) -> dict[tuple[str, str], str]:
    """Tool and service of each line, and the rest of it."""
    lines = out.splitlines()
    starts = [lines[0].index(head) for head in ("tool", "service", "status")]
    return {
        (line[starts[0] : starts[1]].strip(), line[starts[1] : starts[2]].strip()): line[starts[2] :]
        for line in lines[1:]
    }


def test_offline_tools_work(tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", "check", "tools=offline", f"data_dir={tiny['root']}"]) == 0
    rows = table(capsys.readouterr().out)
    assert len(rows) == 7
    assert all(rest.split()[0] in ("works", "slow") for rest in rows.values())


def test_missing_keys_and_servers_that_are_not_there(
    tiny: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setenv("JINA_API_KEY", SECRET)
    overrides = [
        "tools=online",
        f"data_dir={tiny['root']}",
        "tools.executor.tools.layout_parsing.base_url=http://127.0.0.1:9",
    ]
    assert main(["tools", "check", *overrides, "--timeout", "20"]) == 1
    out = capsys.readouterr().out
    rows = table(out)
    assert rows["text_search", ""].startswith("missing key")
    assert rows["image_search", ""].startswith("missing key")
    assert "export SERPER_API_KEY=" in rows["image_search", ""]
    assert rows["layout_parsing", "PaddleX"].startswith("unreachable")
    assert rows["crop", "image_processing"].startswith("works")
    assert SECRET not in out


def test_each_service_of_a_search_is_tried(
    tiny: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(key, SECRET)
    place = "tools.executor.tools.text_search"
    addresses = [f"++{place}.{part}.base_url=http://127.0.0.1:9" for part in ("engine", "reader", "summarizer")]
    retries = [f"{place}.{part}.policy.retries=0" for part in ("engine", "reader", "summarizer")]
    overrides = ["tools=offline", "tools/text_search=serper", f"data_dir={tiny['root']}", *addresses, *retries]
    assert main(["tools", "check", *overrides, f"+{place}.reader.resolve_names=false"]) == 1
    out = capsys.readouterr().out
    rows = table(out)
    for service in ("Serper", "Jina Reader", "summary model"):
        assert rows["text_search", service].startswith("unreachable")
    assert SECRET not in out


def test_a_tool_that_cannot_be_built_is_told_and_the_others_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tools", "check", "tools=offline", f"data_dir={tmp_path}"]) == 1
    rows = table(capsys.readouterr().out)
    assert rows["text_search", ""].startswith("failed")
    assert "opensearch world" in rows["text_search", ""]
    assert rows["sharpen", "image_processing"].startswith("works")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this configuration has no tools; add tools=offline"),
        (["tools=offlin"], "there is no tools 'offlin'; did you mean 'offline'?"),
        (["tools=offline", "tools/crop=pixel"], "there is no tools/crop 'pixel'; did you mean 'pixels'?"),
        (["tools=offline", "--timeout", "0"], "--timeout is 0.0, --slow 5.0: give seconds above 0"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tools", "check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
