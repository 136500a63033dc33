import math

import pytest
import torch

from opensearch_lightning.algorithms import mismatch, policy_loss, truncated_importance_weights
from opensearch_lightning.errors import ConfigurationError

OLD = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
SAMPLING = OLD - torch.tensor([[math.log(4), math.log(0.5), 0.0]], dtype=torch.float64)
ALL = torch.ones(1, 3, dtype=torch.bool)


def test_weights_by_hand():
    # ratios 4, 1/2 and 1
    assert truncated_importance_weights(OLD, SAMPLING, ALL, 2.0).tolist() == [pytest.approx([2.0, 0.5, 1.0])]
    assert truncated_importance_weights(OLD, SAMPLING, ALL, math.inf).tolist() == [pytest.approx([4.0, 0.5, 1.0])]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e9])
def test_masked_positions_reach_nothing(poison):
    mask = torch.tensor([[True, True, False]])
    for old, sampling in [(OLD.masked_fill(~mask, poison), SAMPLING), (OLD, SAMPLING.masked_fill(~mask, poison))]:
        assert truncated_importance_weights(old, sampling, mask, 2.0).tolist() == [pytest.approx([2.0, 0.5, 0.0])]
        got = mismatch(old, sampling, mask)
        assert got.n_tokens == 2
        assert got.absolute.item() == pytest.approx(math.log(4) + math.log(2))
        assert got.largest.item() == pytest.approx(math.log(4))
        # exp(d) - d - 1 with d = log 4 and -log 2
        assert got.kl.item() == pytest.approx(4 - math.log(4) - 1 + 0.5 + math.log(2) - 1)


def test_the_weights_multiply_the_loss_of_each_token():
    logprobs = (OLD + 0.1).requires_grad_()
    weights = truncated_importance_weights(OLD, SAMPLING, ALL, 2.0)
    advantages = torch.tensor([1.0], dtype=torch.float64)
    got = policy_loss(logprobs, OLD, advantages, ALL, importance_weights_BT=weights)
    ratio = math.exp(0.1)
    assert got.loss.item() == pytest.approx(-(2.0 + 0.5 + 1.0) * ratio / 3)
    (gradient,) = torch.autograd.grad(got.loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([-2.0 * ratio / 3, -0.5 * ratio / 3, -ratio / 3])


def test_sampled_tokens_weighted_in_full_have_the_mean_of_the_trained_distribution():
    generator = torch.Generator().manual_seed(0)
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    value = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    drawn = torch.multinomial(engine, 200_000, replacement=True, generator=generator)[None]
    mask = torch.ones_like(drawn, dtype=torch.bool)
    weights = truncated_importance_weights(trainer.log()[drawn], engine.log()[drawn], mask, math.inf)
    assert (weights * value[drawn]).mean().item() == pytest.approx((trainer * value).sum().item(), abs=0.02)
    assert value[drawn].mean().item() < 2.0


def test_nothing_kept_gives_zeros():
    got = mismatch(OLD, SAMPLING, ~ALL)
    assert (got.n_tokens, got.absolute, got.largest, got.kl) == (0, 0, 0, 0)


@pytest.mark.parametrize("cap", [0.5, 0.0, -1.0, math.nan])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(ConfigurationError, match=r"cap=.*at least 1"):
        truncated_importance_weights(OLD, SAMPLING, ALL, cap)
