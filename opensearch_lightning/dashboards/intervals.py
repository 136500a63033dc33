"""Means over a few seeds with the interval that so few allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Interval:
    """``mean ± half`` over ``n`` values; ``half`` is ``None`` for a single value."""

    mean: float
    half: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside."""
        return self.half is not None and abs(self.mean) > self.half


def t_975(degrees: int) -> float:
    """The 97.5% quantile of Student's t; above 30 degrees of freedom by the first terms of its expansion."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def interval_95(values: Sequence[float]) -> Interval:
    """Mean and 95% interval of a mean by Student's t: ``t · s / √n`` with the sample's standard deviation ``s``.

    Raises:
        ValueError: no values.
    """
    n = len(values)
    if not n:
        raise ValueError("an interval needs one value or more")
    half = t_975(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(mean=statistics.fmean(values), half=half, n=n)
