"""Memory of the processes of ``opensearch shard``, at two sizes of the source."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import corpus
from peers.apart import environment_of_a_role
from peers.process_tree import watch
from peers.sft_data import make_policy, shard_command

MAX_MB = 300
WORKERS = 2
_IMPORTS = (
    "import opensearch_lightning.data.sharding.cli, opensearch_lightning.data.sharding.worker; "
    "import litdata.streaming.writer, opensearch_lightning.models, transformers.models.auto.processing_auto; "
    "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
)


def measure(_script: str, folder: Path, rows: int) -> dict[str, Any]:
    """Peaks of the job on an eighth of ``rows`` and on all, and of a process that only imports."""
    environment = environment_of_a_role(folder)
    imports = subprocess.run([sys.executable, "-c", _IMPORTS], env=environment, capture_output=True, check=True)
    found: dict[str, Any] = {"imports": int(imports.stdout.split()[-1]) / 1024}
    policy = folder / "memory_policy"
    for size in (rows // 8, rows):
        source, out = folder / f"memory_{size}", folder / f"memory_{size}_shards"
        if not source.exists():
            corpus.write_corpus(source, rows=size)
        if not policy.exists():
            make_policy(policy, source, max_pixels=262_144)
        shutil.rmtree(out, ignore_errors=True)
        command = shard_command(source, out, policy, workers=WORKERS)
        found[str(size)] = asdict(watch(command, environment=environment, log=folder / "shard.log"))
        shutil.rmtree(out)
    return found


def _sizes(found: dict[str, Any]) -> list[str]:
    return [name for name in found if name != "imports"]


def _above(found: dict[str, Any], size: str) -> float:
    """Peak of the largest process above the imports, in MB."""
    return max(found[size]["processes"].values()) - found["imports"]


def rows_of(found: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Head and rows of a table of megabytes."""
    head = ["rows", "seconds", "rows/s", "imports, MB", "largest process above them", "all processes together"]
    rows = [
        [
            size,
            f"{found[size]['seconds']:.0f}",
            f"{int(size) / found[size]['seconds']:.0f}",
            f"{found['imports']:.0f}",
            f"{_above(found, size):.0f}",
            f"{found[size]['together']:.0f}",
        ]
        for size in _sizes(found)
    ]
    return head, rows


def verdicts(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """The limit at each size, and whether it holds."""
    return [
        (
            f"sharding {size} rows takes {_above(found, size):.0f} MB a process above imports (at most {MAX_MB})",
            _above(found, size) <= MAX_MB,
        )
        for size in _sizes(found)
    ]
