"""Intervals of few values, against numbers worked by hand and the tables of Student's t."""

import pytest

from opensearch_lightning.dashboards.intervals import interval_95, t_975


def test_interval_of_three_values() -> None:
    # mean 2, sample deviation 1, t(2) = 4.303: 4.303 * 1 / sqrt(3) = 2.484
    interval = interval_95([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.half == pytest.approx(2.4844, abs=1e-4)
    assert not interval.excludes_zero


def test_interval_of_five_values() -> None:
    # mean 5, squares of the distances 4 + 1 + 0 + 1 + 4 = 10, deviation sqrt(10 / 4), t(4) = 2.776
    interval = interval_95([3.0, 4.0, 5.0, 6.0, 7.0])
    assert interval.half == pytest.approx(2.776 * (10 / 4) ** 0.5 / 5**0.5, rel=1e-12)
    assert interval.half == pytest.approx(1.9629, abs=1e-4)
    assert interval.excludes_zero
    assert interval_95([-3.0, -4.0, -5.0, -6.0, -7.0]).excludes_zero


def test_one_value_has_no_interval() -> None:
    interval = interval_95([0.5])
    assert (interval.mean, interval.half) == (0.5, None)
    assert not interval.excludes_zero


def test_no_values() -> None:
    with pytest.raises(ValueError, match="one value or more"):
        interval_95([])


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (9, 2.262), (30, 2.042), (40, 2.0211), (120, 1.9799)])
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_975(degrees) == pytest.approx(quantile, abs=2e-4)
