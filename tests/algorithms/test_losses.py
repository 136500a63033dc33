import math
from typing import Any

import pytest
import torch

from opensearch_lightning.algorithms import (
    aggregate,
    clamp_fatal_advantages,
    fatal_loss_mask,
    kl_penalized_rewards,
    low_variance_kl,
    policy_loss,
)
from opensearch_lightning.errors import ConfigurationError
from tests.algorithms.golden import TOLERANCES, cases

AGGREGATIONS: list[Any] = ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"]
aggregations = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def random_batch(rows=6, tokens=9, seed=0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, tokens, generator=draw, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(rows, tokens, generator=draw, dtype=torch.float64)
    advantages = torch.randn(rows, generator=draw, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=draw) < 0.6
    mask[1] = False
    return logprobs.requires_grad_(), old, advantages, mask


def gradient(loss, of) -> Any:
    return torch.autograd.grad(loss, of)[0]


@aggregations
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("case", cases("policy_loss"))
def test_loss_equals_the_golden_one(case, dtype, tolerance, aggregation):
    logprobs, old, advantages = (
        torch.tensor(case[key], dtype=dtype) for key in ("logprobs", "old_logprobs", "advantages")
    )
    mask = torch.tensor(case["loss_mask"])
    got = policy_loss(logprobs, old, advantages, mask, case["clip_low"], case["clip_high"], aggregation)
    assert got.loss.dtype == dtype
    assert got.loss.item() == pytest.approx(case["loss"][aggregation], abs=tolerance)


def test_by_hand_with_the_clip_on_either_side():
    # ratios 1.5 (clipped to 1.28), 0.5 (to 0.8), 1; advantages +1 and -1
    old = torch.zeros(2, 3, dtype=torch.float64)
    logprobs = torch.tensor([[1.5, 0.5, 1.0]], dtype=torch.float64).log().expand(2, 3)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    # row 0: min(1.5, 1.28) + min(0.5, 0.8) + 1 = 2.78; row 1: min(-1.5, -1.28) + min(-0.5, -0.8) = -2.3
    expected: dict[Any, float] = {
        "seq-mean-token-mean": -(2.78 / 3 - 2.3 / 2) / 2,
        "seq-mean-token-sum": -(2.78 - 2.3) / 2,
        "token-mean": -(2.78 - 2.3) / 5,
    }
    for aggregation, value in expected.items():
        got = policy_loss(logprobs, old, advantages, mask, 0.2, 0.28, aggregation)
        assert got.loss.item() == pytest.approx(value)
        assert got.clip_fraction.item() == pytest.approx(2 / 5)
        assert got.ratio_max_error.item() == pytest.approx(0.5)
        assert got.ratio_mean.item() == pytest.approx((1.5 + 0.5 + 1 + 1.5 + 0.5) / 5)
        assert got.n_tokens == 5


def test_clipped_tokens_have_no_gradient_and_the_others_minus_ratio_times_advantage():
    logprobs = torch.tensor([[1.5, 0.5, 1.1]], dtype=torch.float64).log().requires_grad_()
    old, mask = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3)
    for advantage, expected in [(2.0, [0.0, -1.0, -2.2]), (-2.0, [3.0, 0.0, 2.2])]:
        got = policy_loss(logprobs, old, torch.tensor([advantage]), mask, 0.2, 0.28, "seq-mean-token-sum")
        torch.testing.assert_close(gradient(got.loss, logprobs), torch.tensor([expected], dtype=torch.float64))


@aggregations
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -9.0, 9.0])
def test_masked_positions_poison_neither_loss_nor_gradient(poison, aggregation):
    logprobs, old, advantages, mask = random_batch()
    ref = old - 0.1

    def run(logprobs, old, advantages, ref):
        got = policy_loss(
            logprobs, old, advantages, mask, aggregation=aggregation, ref_logprobs_BT=ref, kl_coefficient=0.1
        )
        return got, gradient(got.loss, logprobs)

    clean, clean_gradient = run(logprobs, old, advantages, ref)
    dirty, dirty_old, dirty_ref = (tensor.detach().masked_fill(~mask, poison) for tensor in (logprobs, old, ref))
    dirty_advantages = advantages.masked_fill(~mask.any(-1), poison)
    got, got_gradient = run(dirty.requires_grad_(), dirty_old, dirty_advantages, dirty_ref)
    for name in ("loss", "kl", "clip_fraction", "ratio_mean", "ratio_max_error"):
        torch.testing.assert_close(getattr(got, name), getattr(clean, name), atol=0, rtol=0)
    torch.testing.assert_close(got_gradient, clean_gradient, atol=0, rtol=0)
    assert (got_gradient[~mask] == 0).all()


@aggregations
def test_shards_with_the_global_denominator_add_up_to_the_whole(aggregation):
    logprobs, old, advantages, mask = random_batch(rows=8)
    ref = old + 0.2
    total = mask.sum() if aggregation == "token-mean" else len(mask)

    def run(rows, denominator):
        got = policy_loss(
            logprobs[rows], old[rows], advantages[rows], mask[rows], 0.2, 0.28, aggregation, denominator,
            ref_logprobs_BT=ref[rows], kl_coefficient=0.05,
        )  # fmt: skip
        return got.loss

    whole = run(slice(None), None)
    for cut in (1, 2, 5):
        parts = sum(run(slice(i, i + cut), total) for i in range(0, 8, cut))
        torch.testing.assert_close(parts, whole)
        torch.testing.assert_close(gradient(parts, logprobs), gradient(run(slice(None), None), logprobs))


@aggregations
def test_padding_a_batch_changes_nothing(aggregation):
    logprobs, old, advantages, mask = random_batch()
    more_logprobs, more_old = (torch.cat([tensor, tensor.new_full((6, 4), -7)], 1) for tensor in (logprobs, old))
    more = torch.cat([mask, torch.zeros(6, 4, dtype=torch.bool)], 1)
    expected = policy_loss(logprobs, old, advantages, mask, aggregation=aggregation).loss
    torch.testing.assert_close(
        policy_loss(more_logprobs, more_old, advantages, more, aggregation=aggregation).loss, expected
    )


@aggregations
def test_nothing_to_train_gives_zero_with_a_gradient_of_zero(aggregation):
    logprobs, old, advantages, mask = random_batch()
    for denominator in (None, 0):
        got = policy_loss(logprobs, old, advantages, mask & False, aggregation=aggregation, denominator=denominator)
        assert got.loss == 0
        assert got.clip_fraction == got.ratio_mean == got.ratio_max_error == 0
        assert (gradient(got.loss, logprobs) == 0).all()


def test_a_row_without_kept_tokens_counts_in_the_mean_over_trajectories():
    logprobs = torch.zeros(4, 2)
    mask = torch.tensor([[True, True], [False, False], [False, False], [False, False]])
    got = policy_loss(logprobs, logprobs, torch.ones(4), mask, aggregation="seq-mean-token-mean")
    assert got.loss.item() == -0.25


def test_a_denominator_below_one_is_used_as_it_is():
    # Gradients averaged over 4 ranks: 2 tokens in all make a denominator of 0.5 a rank.
    one = torch.ones(1, 2, dtype=torch.bool)
    assert aggregate(torch.ones(1, 2), one, "token-mean", 0.5).item() == 4


@aggregations
def test_the_policy_that_sampled_has_ratio_one_and_the_gradient_of_reinforce(aggregation):
    logprobs, _, advantages, mask = random_batch()
    got = policy_loss(logprobs, logprobs.detach(), advantages, mask, aggregation=aggregation)
    assert got.ratio_max_error == 0
    assert got.clip_fraction == 0
    reinforce = aggregate(-logprobs * advantages[:, None], mask, aggregation)
    torch.testing.assert_close(gradient(got.loss, logprobs), gradient(reinforce, logprobs))


def test_proposition_1():
    """A fatal trajectory below the mean adds no gradient; above it, that of its prefix at its own advantage."""
    old = -torch.rand(2, 9, dtype=torch.float64)
    logprobs = (old + torch.linspace(-0.1, 0.1, 9, dtype=torch.float64)).requires_grad_()
    steps = torch.tensor([[-1, 0, 0, -1, 1, 1, -1, 2, 2]] * 2)
    kept = fatal_loss_mask(steps, torch.tensor([1, 1]))
    advantages = clamp_fatal_advantages(torch.tensor([-0.7, 0.6], dtype=torch.float64), torch.tensor([True, True]))
    got = gradient(policy_loss(logprobs, old, advantages, kept, denominator=1).loss, logprobs)
    assert (got[0] == 0).all()
    # GRPO of Search-R1 on the two tokens sampled before step 1, whose ratios are within the clip range
    ratio = (logprobs - old).exp()[1, 1:3]
    search_r1 = -(0.6 * ratio).mean()
    torch.testing.assert_close(got[1], gradient(search_r1, logprobs)[1])
    assert (got[1, 1:3] < 0).all()
    assert (got[1, 3:] == 0).all()


def test_kl_by_hand():
    d = math.log(2)
    got = low_variance_kl(torch.tensor([[-1.0, -1.0]]).double(), torch.tensor([[-1.0 + d, -1.0 - d]]).double())
    assert got.tolist() == [pytest.approx([2 - d - 1, 0.5 + d - 1])]


@aggregations
def test_the_kl_term_is_aggregated_as_the_loss_is(aggregation):
    logprobs, old, advantages, mask = random_batch()
    ref = logprobs.detach() + 0.1 * torch.randn_like(logprobs)
    without = policy_loss(logprobs, old, advantages, mask, aggregation=aggregation)
    got = policy_loss(logprobs, old, advantages, mask, aggregation=aggregation, ref_logprobs_BT=ref, kl_coefficient=0.3)
    kl = aggregate(low_variance_kl(logprobs, ref), mask, aggregation)
    torch.testing.assert_close(got.kl, kl.detach())
    torch.testing.assert_close(got.loss, without.loss + 0.3 * kl)
    assert without.kl == 0


@aggregations
def test_the_entropy_is_sought_and_aggregated_as_the_loss_is(aggregation):
    logprobs, old, advantages, mask = random_batch()
    entropy = torch.rand_like(old).requires_grad_()
    poisoned = entropy.masked_fill(~mask, math.nan)
    without = policy_loss(logprobs, old, advantages, mask, aggregation=aggregation)
    got = policy_loss(
        logprobs, old, advantages, mask, aggregation=aggregation, entropy_BT=poisoned, entropy_coefficient=0.1
    )
    mean = aggregate(entropy, mask, aggregation)
    torch.testing.assert_close(got.entropy, mean.detach())
    torch.testing.assert_close(got.loss, without.loss - 0.1 * mean)
    torch.testing.assert_close(gradient(got.loss, entropy), -0.1 * gradient(mean, entropy))
    watched = policy_loss(logprobs, old, advantages, mask, aggregation=aggregation, entropy_BT=entropy)
    torch.testing.assert_close(watched.loss, without.loss)
    assert without.entropy == 0


def test_kl_inside_the_reward_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -1.0, -1.0], [-2.0, -3.0, math.inf]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    # sums of log ratios: 0.5 - 1 and 1 + 2
    got = kl_penalized_rewards(torch.tensor([1.0, 0.5]), logprobs, ref, mask, 0.1)
    assert got.tolist() == pytest.approx([1.05, 0.2])


def test_integer_masks_are_taken():
    logprobs, old, advantages, mask = random_batch()
    torch.testing.assert_close(
        policy_loss(logprobs, old, advantages, mask.long()).loss, policy_loss(logprobs, old, advantages, mask).loss
    )


def test_bad_settings_are_refused_with_the_value():
    logprobs, old, advantages, mask = random_batch()
    unknown: Any = "mean"
    with pytest.raises(ConfigurationError, match=r"\(-0.1, 0.28\)"):
        policy_loss(logprobs, old, advantages, mask, -0.1)
    with pytest.raises(ConfigurationError, match=r"'mean'.*token-mean"):
        policy_loss(logprobs, old, advantages, mask, aggregation=unknown)
    with pytest.raises(ConfigurationError, match=r"kl_coefficient=0.1 needs ref_logprobs"):
        policy_loss(logprobs, old, advantages, mask, kl_coefficient=0.1)
    with pytest.raises(ConfigurationError, match=r"entropy_coefficient=0.1 needs entropy_BT"):
        policy_loss(logprobs, old, advantages, mask, entropy_coefficient=0.1)
