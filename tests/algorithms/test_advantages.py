import math

import pytest
import torch

from opensearch_lightning.algorithms import clamp_bias, clamp_fatal_advantages, group_advantages
from opensearch_lightning.errors import ConfigurationError, DataError
from tests.algorithms.golden import TOLERANCES, cases

nan = math.nan


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages_equal_the_golden_ones(case, dtype, tolerance, estimator):
    golden = case[estimator]
    valid = None if case["valid"] is None else torch.tensor(case["valid"])
    ids, fatal = torch.tensor(case["group_ids"]), torch.tensor(case["fatal"])
    got = group_advantages(torch.tensor(case["rewards"], dtype=dtype), ids, estimator, valid, case["delta"])
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.tensor(golden["advantages"], dtype=dtype), atol=tolerance, rtol=0)
    clamped = torch.tensor(golden["clamped"], dtype=dtype)
    torch.testing.assert_close(clamp_fatal_advantages(got, fatal), clamped, atol=tolerance, rtol=0)
    expected = {int(group): bias for group, bias in golden["bias_per_group"].items()}
    assert clamp_bias(got, fatal, ids, valid) == pytest.approx(expected, abs=tolerance)


def test_grpo_by_hand():
    # mean 2, population variance (1 + 1 + 4 + 4 + 0) / 5 = 2
    got = group_advantages(torch.tensor([1.0, 3.0, 0.0, 4.0, 2.0]), torch.zeros(5, dtype=torch.long), delta=0.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, -2.0, 2.0, 0.0]) / math.sqrt(2))


def test_nearly_equal_float32_rewards_are_not_lost_in_rounding():
    rewards = 0.9 + torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0]) * 2**-23
    ids = torch.zeros(7, dtype=torch.long)
    for estimator in ("grpo", "rloo"):
        exact = group_advantages(rewards.double(), ids, estimator)
        got = group_advantages(rewards, ids, estimator)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


def test_rloo_by_hand():
    # means of the others: 2, 1.5, 1, 1.5
    got = group_advantages(torch.tensor([0.0, 1.5, 3.0, 1.5]), torch.zeros(4, dtype=torch.long), "rloo")
    torch.testing.assert_close(got, torch.tensor([-2.0, 0.0, 2.0, 0.0]))


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_groups_go_by_id_wherever_their_rows_stand(estimator):
    rewards, ids = torch.rand(24), torch.arange(24) % 3 + 1000
    whole = group_advantages(rewards, ids, estimator)
    order = torch.randperm(24)
    torch.testing.assert_close(group_advantages(rewards[order], ids[order], estimator), whole[order])
    alone = group_advantages(rewards[ids == 1001], ids[ids == 1001], estimator)
    torch.testing.assert_close(whole[ids == 1001], alone)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, 0.9, 1.0, 1e6])
def test_groups_of_one_and_equal_rewards_get_exactly_zero(estimator, dtype, size, reward):
    got = group_advantages(torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.long), estimator)
    assert got.tolist() == [0.0] * size


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_invalid_rows_have_no_vote_whatever_their_reward(estimator):
    ids = torch.tensor([5, 5, 5, 5])
    valid = torch.tensor([True, False, True, True])
    expected = group_advantages(torch.tensor([0.0, 1.0, 0.5]), ids[:3], estimator)
    for poison in (0.0, 100.0, nan, math.inf):
        got = group_advantages(torch.tensor([0.0, poison, 1.0, 0.5]), ids, estimator, valid)
        torch.testing.assert_close(got[valid], expected)
        assert got[1] == 0


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_no_valid_row_and_one_valid_row_give_zero(estimator):
    ids, rewards = torch.tensor([0, 0, 1]), torch.tensor([nan, 0.3, nan])
    assert group_advantages(rewards, ids, estimator, torch.tensor([False, True, False])).tolist() == [0, 0, 0]
    assert group_advantages(rewards, ids, estimator, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_no_gradient_flows_through_the_statistics():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_advantages(rewards, torch.tensor([0, 0])).requires_grad


def test_a_valid_reward_that_is_not_finite_is_named():
    with pytest.raises(DataError, match=r"nan of row 2.*not valid"):
        group_advantages(torch.tensor([0.0, 1.0, nan]), torch.zeros(3, dtype=torch.long))


def test_an_unknown_estimator_is_named():
    with pytest.raises(ConfigurationError, match=r"'gae'.*grpo"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.long), "gae")  # type: ignore[arg-type]


def test_the_clamp_touches_fatal_rows_from_below_only():
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0])
    fatal = torch.tensor([True, True, False, False, True])
    assert clamp_fatal_advantages(advantages, fatal).tolist() == [0.0, 1.0, -1.0, 1.0, 0.0]


def test_the_bias_by_hand():
    advantages = torch.tensor([-1.0, 0.5, -0.5, 2.0, -4.0, -3.0])
    fatal = torch.tensor([True, False, True, True, True, True])
    ids = torch.tensor([7, 7, 7, 7, 9, 9])
    # group 7: (1 + 0.5) / 4; group 9: (4 + 3) / 2
    assert clamp_bias(advantages, fatal, ids) == {7: 0.375, 9: 3.5}


def test_the_bias_is_what_the_clamp_adds_to_the_mean():
    advantages, fatal, ids = torch.randn(60).double(), torch.rand(60) < 0.4, torch.arange(60) % 4
    bias = clamp_bias(advantages, fatal, ids)
    added = clamp_fatal_advantages(advantages, fatal) - advantages
    assert bias == pytest.approx({group: added[ids == group].mean().item() for group in range(4)})


def test_the_bias_counts_the_rows_that_voted():
    advantages, fatal = torch.tensor([-1.0, nan, 0.0]), torch.tensor([True, True, False])
    ids = torch.tensor([0, 0, 1])
    assert clamp_bias(advantages, fatal, ids, torch.tensor([True, False, False])) == {0: 1.0}


def test_nobody_and_everybody_fatal():
    advantages, ids = torch.tensor([-1.0, 1.0]), torch.tensor([0, 0])
    nobody, everybody = torch.tensor([False, False]), torch.tensor([True, True])
    assert clamp_bias(advantages, nobody, ids) == {0: 0.0}
    assert clamp_bias(advantages, everybody, ids) == {0: 0.5}
    assert clamp_fatal_advantages(advantages, everybody).tolist() == [0.0, 1.0]


def test_without_the_deviation_by_hand():
    rewards, ids = torch.tensor([1.0, 3.0, 0.0, 4.0]), torch.zeros(4, dtype=torch.long)
    got = group_advantages(rewards, ids, "grpo", normalize_std=False)
    assert got.tolist() == [-1.0, 1.0, -2.0, 2.0]
    torch.testing.assert_close(group_advantages(rewards, ids, "rloo", normalize_std=False), got * 4 / 3)


def test_non_fatal_baseline_by_hand():
    rewards = torch.tensor([1.0, 3.0, 0.0, 5.0, 2.0], dtype=torch.float64)
    fatal = torch.tensor([False, False, True, True, False])
    ids = torch.zeros(5, dtype=torch.long)
    settings = {"baseline": "non_fatal", "is_fatal_B": fatal}
    # the non-fatal rewards are 1, 3, 2: mean 2
    plain = group_advantages(rewards, ids, "grpo", normalize_std=False, **settings)
    assert plain.tolist() == [-1.0, 1.0, -2.0, 3.0, 0.0]
    scaled = group_advantages(rewards, ids, "grpo", delta=0.0, **settings)
    # the deviation is that of all: mean 2.2, population variance (1.44 + 0.64 + 4.84 + 7.84 + 0.04) / 5
    torch.testing.assert_close(scaled, plain / math.sqrt(2.96))
    # the others of row 0 are 3 and 2; a fatal row has all three beside it
    assert group_advantages(rewards, ids, "rloo", **settings).tolist() == [-1.5, 1.5, -2.0, 3.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_fatal_rows_do_not_move_the_others_from_the_non_fatal_baseline(estimator):
    ids, fatal = torch.arange(40) % 4, torch.rand(40) < 0.5
    fatal[:8] = False
    rewards = torch.rand(40, dtype=torch.float64)
    settings = {"estimator": estimator, "normalize_std": False}
    got = group_advantages(rewards, ids, baseline="non_fatal", is_fatal_B=fatal, **settings)
    alone = group_advantages(rewards[~fatal], ids[~fatal], **settings)
    torch.testing.assert_close(got[~fatal], alone)
    for group in range(4):
        assert got[~fatal & (ids == group)].sum().item() == pytest.approx(0, abs=1e-12)
    # the clamp over all rows leaves more than nothing behind: its bias
    clamped = clamp_fatal_advantages(group_advantages(rewards, ids, **settings), fatal)
    assert clamped.sum() > 0.1


def test_degenerate_groups_of_the_non_fatal_baseline():
    rewards, ids = torch.tensor([1.0, 0.0, 0.7, 0.2]), torch.zeros(4, dtype=torch.long)
    for estimator, normalize_std in [("grpo", True), ("grpo", False), ("rloo", True)]:
        settings = {"estimator": estimator, "normalize_std": normalize_std, "baseline": "non_fatal"}
        everybody = group_advantages(rewards, ids, is_fatal_B=torch.ones(4, dtype=torch.bool), **settings)
        assert everybody.tolist() == [0.0] * 4
        one = group_advantages(rewards, ids, is_fatal_B=torch.tensor([False, True, True, True]), **settings)
        # rewards 1, 0, 0.7, 0.2: mean 0.475, population variance (0.275625 + 0.225625 + 0.050625 + 0.075625) / 4
        scale = math.sqrt(0.156875) if normalize_std and estimator == "grpo" else 1.0
        assert one.tolist() == pytest.approx([0.0, -1.0 / scale, -0.3 / scale, -0.8 / scale], abs=1e-5)
    valid = torch.tensor([True, True, True, False])
    got = group_advantages(
        rewards, ids, "rloo", valid, baseline="non_fatal", is_fatal_B=torch.tensor([False, True, False, True])
    )
    assert got.tolist() == pytest.approx([0.3, -0.85, -0.3, 0.0])


def test_voters_nearly_alike_do_not_blow_up_a_fatal_row():
    rewards = torch.tensor([0.8, 0.801, 0.8, 1.0], dtype=torch.float64)
    fatal = torch.tensor([False, False, False, True])
    got = group_advantages(rewards, torch.zeros(4, dtype=torch.long), baseline="non_fatal", is_fatal_B=fatal)
    assert 0 < got[3] < 4
    equal = group_advantages(
        torch.full((4,), 0.9), torch.zeros(4, dtype=torch.long), baseline="non_fatal", is_fatal_B=fatal
    )
    assert equal.tolist() == [0.0] * 4


def test_an_unknown_baseline_and_untold_fatal_rows_are_named():
    rewards, ids = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ConfigurationError, match=r"'good'.*non_fatal"):
        group_advantages(rewards, ids, baseline="good")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is_fatal_B"):
        group_advantages(rewards, ids, baseline="non_fatal")
