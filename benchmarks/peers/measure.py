"""What one measured process is told and what it notes: settings, seconds by part, memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of a GRPO run, the same for either side.

    ``steps`` are measured for each of the two tool times, after one step that warms up. ``micro_batch`` counts rollouts
    of one forward and backward pass.
    """

    folder: str
    prompts: int = 8
    group: int = 8
    steps: int = 2
    tool_seconds: float = 0.1
    coroutines: bool = False
    completion_tokens: int = 512
    micro_batch: int = 8
    lr: float = 1e-6
    teaching_steps: int = 220
    seed: int = 0

    @property
    def policy(self) -> Path:
        """Folder of the checkpoint, of the tasks it was taught."""
        return Path(self.folder) / f"policy_{self.task_count()}_{self.teaching_steps}"

    def tool_times(self) -> list[float]:
        """Seconds that a tool takes, a training step each: both in turns, behind the warm-up."""
        return [0.0, *[0.0, self.tool_seconds] * self.steps]

    def task_count(self) -> int:
        """Tasks of the whole run; none comes twice."""
        return self.prompts * len(self.tool_times())

    def reward(self, rollout: int) -> float:
        """Reward of a rollout by its place in its group: every advantage differs from zero, whatever was sampled."""
        return rollout % self.group / (self.group - 1)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Settings that :meth:`write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write them for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class Recorder:
    """Collects the figures of each step of one process."""

    steps: list[dict[str, float]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last_s: float = 0.0
    _last_cpu_s: float = 0.0

    def start(self) -> None:
        """Begin: everything is loaded, and the first step follows."""
        self.figures["loaded_mb"] = memory_mb("VmRSS")
        self._last_s, self._last_cpu_s = time.perf_counter(), time.process_time()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part of this step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - started

    def end_step(self, **figures: float) -> None:
        """Keep the step that ends now."""
        now, cpu = time.perf_counter(), time.process_time()
        self.steps.append({"step_s": now - self._last_s, "cpu_s": cpu - self._last_cpu_s, **self._seconds, **figures})
        self._seconds.clear()
        self._last_s, self._last_cpu_s = now, cpu

    def report(self) -> dict[str, Any]:
        """All figures, the peak of memory included."""
        return {**self.figures, "peak_mb": memory_mb("VmHWM"), "steps": self.steps}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def memory_mb(name: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}: memory is read from Linux")


def digest(prompts: list[list[int]]) -> str:
    """Names a set of tokenized prompts, whatever their order."""
    return hashlib.sha256(repr(sorted(prompts)).encode()).hexdigest()[:12]
