import pytest
import torch

from opensearch_lightning.algorithms import fatal_loss_mask, find_fatal_step
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import NON_FATAL
from tests.algorithms.golden import cases


@pytest.mark.parametrize("case", cases("fatal_steps"))
def test_fatal_step_equals_the_golden_one(case):
    assert find_fatal_step(case["errors"], case["k"], "first") == case["first"]
    assert find_fatal_step(case["errors"], case["k"], "threshold") == case["threshold"]


def test_only_errors_in_a_row_count_and_the_first_run_wins():
    ok, err = False, True
    assert find_fatal_step([err, err, ok, err, err, err, ok, err, err, err]) == 3
    assert find_fatal_step([err, ok, err, ok, err, ok, err]) is None


def test_a_trajectory_that_recovers_after_k_errors_is_fatal_still():
    assert find_fatal_step([False, True, True, True, False, False]) == 1


def test_bad_settings_are_refused_with_the_value():
    with pytest.raises(ConfigurationError, match="k=0"):
        find_fatal_step([True], k=0)
    with pytest.raises(ConfigurationError, match=r"'last'.*first"):
        find_fatal_step([True], onset="last")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases("loss_masks"))
def test_loss_mask_equals_the_golden_one(case):
    mask = fatal_loss_mask(torch.tensor(case["step_ids"]), torch.tensor(case["fatal_step"]))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == case["loss_mask"]


def test_a_non_fatal_trajectory_keeps_every_sampled_token():
    steps = torch.tensor([[-1, 0, 0, -1, 1, 99, -1]])
    assert fatal_loss_mask(steps, torch.tensor([NON_FATAL])).equal(steps >= 0)


def test_fatal_from_the_first_step_keeps_nothing():
    assert not fatal_loss_mask(torch.tensor([[-1, 0, 1, 2]]), torch.tensor([0])).any()
