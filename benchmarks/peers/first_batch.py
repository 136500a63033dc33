"""Time from the start of a process to its first training batch, of a source as large as the released set."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import corpus
from peers.apart import run_apart, seconds_since_start
from peers.sft_data import SFTSettings, make_policy, shard_command

MAX_SHARE = 1 / 5
BATCH = 8
_OURS, _COLD, _WARM = "first ours", "first TRL", "first TRL again"


def _source(folder: Path) -> Path:
    return folder / "released"


def _prepare(folder: Path) -> dict[str, Any]:
    """Corpus, policy, and our shards with the rows' lengths."""
    source = _source(folder)
    started = time.perf_counter()
    policy = source / "policy"
    if not policy.exists():
        make_policy(policy, source, max_pixels=262_144)
    subprocess.run(shard_command(source, source / "shards", policy), check=True)
    return {"seconds": time.perf_counter() - started}


def _ours(folder: Path) -> dict[str, Any]:
    from peers import our_sft

    imports_s = seconds_since_start()
    data = our_sft.data_module(_source(folder) / "shards", _source(folder) / "policy", batch=BATCH)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    return {"imports_s": imports_s, "first_s": seconds_since_start(), "rows": our_sft.rows_of(batch)}


def _theirs(folder: Path) -> dict[str, Any]:
    from peers import trl_sft
    from peers.measure import Recorder

    imports_s = seconds_since_start()
    settings = SFTSettings(folder=str(folder), batch=BATCH)
    rows = trl_sft.load_rows(_source(folder))
    loaded_s = seconds_since_start()
    trainer = trl_sft.make_trainer(settings, _source(folder) / "policy", rows, "random", Recorder())
    batch = next(iter(trainer.get_train_dataloader()))
    return {
        "imports_s": imports_s,
        "loaded_s": loaded_s,
        "first_s": seconds_since_start(),
        "rows": len(batch["input_ids"]),
    }


ROLES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "first prepare": _prepare,
    _OURS: _ours,
    _COLD: _theirs,
    _WARM: _theirs,
}


def measure(script: str, folder: Path, rows: int) -> dict[str, Any]:
    """Reports of one start of either side, and of a second one of the peer."""
    folder.mkdir(parents=True, exist_ok=True)
    source = _source(folder)
    if not source.exists():
        corpus.write_corpus(source, rows=rows)
    if not (source / "shards").exists():
        run_apart(script, "first prepare", folder)
    shutil.rmtree(folder / "hf", ignore_errors=True)
    return {role: run_apart(script, role, folder) for role in (_OURS, _COLD, _WARM)}


def _behind_imports(report: dict[str, Any]) -> float:
    seconds: float = report["first_s"] - report["imports_s"]
    return seconds


def rows_of(reports: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Head and rows of a table of seconds."""
    head = ["seconds", "to the first batch", "of it imports", "behind the imports", "to ours"]
    own = _behind_imports(reports[_OURS])
    names = {_OURS: "ours", _COLD: "TRL", _WARM: "TRL, a second time"}
    rows = [
        [
            name,
            f"{reports[role]['first_s']:.1f}",
            f"{reports[role]['imports_s']:.1f}",
            f"{_behind_imports(reports[role]):.1f}",
            f"{_behind_imports(reports[role]) / own:.1f}",
        ]
        for role, name in names.items()
    ]
    return head, rows


def verdicts(reports: dict[str, Any]) -> list[tuple[str, bool]]:
    """The limit with its figure, and whether it holds, with imports and without."""
    found = []
    for name, figure in (("behind the imports", _behind_imports), ("from the start", lambda report: report["first_s"])):
        ours, theirs = figure(reports[_OURS]), figure(reports[_COLD])
        text = f"first batch {name} after {ours:.1f} s, TRL {theirs:.1f} (at most a fifth)"
        found.append((text, ours <= MAX_SHARE * theirs))
    return found
