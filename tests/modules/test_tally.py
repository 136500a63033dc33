"""Figures of an update."""

import math

import pytest
import torch

from opensearch_lightning.modules.tally import Tally


class _Alone:
    def reduce(self, values: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return values


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan), (1.0, math.nan, 2.0)])
def test_an_extreme_that_is_no_number_is_not_lost(values: tuple[float, ...]) -> None:
    tally = Tally()
    for value in values:
        tally.raise_to(error=torch.tensor(value))
    _, highest = tally.over_ranks(_Alone(), torch.device("cpu"))
    assert math.isnan(highest["error"])
