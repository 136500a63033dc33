"""Peak memory of every process that a command starts, its own included."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class TreePeak:
    """Peak of each process's resident memory (MB) by its id, the largest sum at one time (MB), and seconds."""

    processes: Mapping[int, float]
    together: float
    seconds: float

    @property
    def largest(self) -> float:
        """Peak of the largest process, in MB."""
        return max(self.processes.values())


def watch(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> TreePeak:
    """Run ``command`` and look at its processes every 20 ms. A process's own peak (``VmHWM``) is what counts.

    The sum takes shared pages once a process, so it is an upper bound.
    """
    peaks: dict[int, float] = {}
    together = 0.0
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            found = {pid: _memory(pid) for pid in _tree(process.pid)}
            for pid, (peak, _) in found.items():
                peaks[pid] = max(peak, peaks.get(pid, 0.0))
            together = max(together, sum(now for _, now in found.values()))
            time.sleep(INTERVAL_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
    return TreePeak(processes=peaks, together=together, seconds=time.perf_counter() - started)


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        try:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:  # it ended
            continue
    return found


def _memory(pid: int) -> tuple[float, float]:
    """Peak and present resident memory in MB; zeros for a process that ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    sizes = {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines) if "Vm" in name
    }
    return sizes.get("VmHWM", 0.0), sizes.get("VmRSS", 0.0)
