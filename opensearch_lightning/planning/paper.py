"""What the paper's own runs took (Tables 4 and 5), to set an estimate beside."""

from __future__ import annotations

from dataclasses import dataclass

DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A run of the paper.

    Attributes:
        where: table of the paper.
        gpus: H20 GPUs it ran on, rollouts included.
        days: that it took, about.
        updates: that it made, as this package counts them.
        framework: how the paper ran it, where this package does it otherwise.
    """

    where: str
    gpus: int
    days: float
    updates: int
    framework: str


_SFT = "DeepSpeed ZeRO-3, as here"
_RL = "Megatron with tensor, pipeline and context parallelism, engine and actor on the same 64 GPUs"
RUNS = {
    ("sft", "Qwen3-VL-8B-Instruct"): PaperRun(where="Table 4", gpus=256, days=2, updates=1144, framework=_SFT),
    ("sft", "Qwen3-VL-30B-A3B-Instruct"): PaperRun(where="Table 4", gpus=256, days=4, updates=1144, framework=_SFT),
    ("grpo", "Qwen3-VL-8B-Instruct"): PaperRun(where="Table 5", gpus=64, days=10, updates=800, framework=_RL),
    ("grpo", "Qwen3-VL-30B-A3B-Instruct"): PaperRun(where="Table 5", gpus=64, days=10, updates=400, framework=_RL),
}
"""Runs by kind and model."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An estimate beside the paper's cost, both for the paper's number of updates.

    Attributes:
        run: of the paper.
        estimated_days: by this plan.
        longest_days: by this plan where each update waits for a row of the greatest length; ``None`` with packed rows.
        implied_mfu: utilization at which training alone would have taken the paper's time.
        implied_network: bytes per second and node at which communication alone would have.
    """

    run: PaperRun
    estimated_days: float
    longest_days: float | None
    implied_mfu: float
    implied_network: float

    @property
    def ratio(self) -> float:
        """Estimate over paper."""
        return self.estimated_days / self.run.days
