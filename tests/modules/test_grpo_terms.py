"""The optional terms of the objective, each against a gradient worked out from plain logits."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.models import collect_router_logits, forbidden_token_ids, policy_logprobs, router_losses
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.modules.passes import pack_rows
from opensearch_lightning.modules.rollout_rows import RolloutRows
from opensearch_lightning.types import Trajectory
from tests.models.test_router import moe
from tests.models.tiny import tiny_policy
from tests.modules.rollouts import batch_of, scored, trajectory, update


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_policy()


@pytest.fixture(scope="module")
def reference(policy: Any) -> Any:
    """The policy, some way off."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def rows(policy: Any) -> list[Trajectory]:
    return scored(policy, [trajectory("a", r, float(r == 0), steps=1 + r) for r in range(3)])


def distributions(model: Any, row: Trajectory) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy ``[N]`` at the sampled tokens of ``row``, from the logits of the whole vocabulary."""
    logits = model(input_ids=row.token_ids[None], use_cache=False).logits[0, :-1]
    keep = [i for i in range(logits.shape[1]) if i not in forbidden_token_ids(model.config)]
    logprobs = logits[:, keep].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logits.gather(1, row.token_ids[1:, None])[:, 0] - logits[:, keep].logsumexp(-1)
    mask = (row.step_ids >= 0)[1:]
    return chosen[mask], entropy[mask]


def gradient_of(
    policy: Any, rows: Sequence[Trajectory], term: Callable[[int, Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Gradient of the mean of ``term(row, log-probabilities, entropies)`` over the rows."""
    trained = copy.deepcopy(policy)
    total = sum(term(i, *distributions(trained, row)) for i, row in enumerate(rows)) / len(rows)
    total.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.named_parameters()}


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, two[name], atol=3e-6, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
    assert max(float(g.abs().max()) for g in two.values()) > 1e-3


ADVANTAGES = [1.0, -0.5, -0.5]


@pytest.mark.parametrize("max_tokens", [74_576, 20])
def test_the_kl_penalty_in_the_loss(policy: Any, reference: Any, rows: list[Trajectory], max_tokens: int) -> None:
    def term(i: int, logprobs: Tensor, _: Tensor) -> Tensor:
        ratio = (logprobs - logprobs.detach()).exp()
        d = distributions(reference, rows[i])[0].detach() - logprobs
        return -(ADVANTAGES[i] * ratio - 0.3 * (d.exp() - d - 1)).mean()

    got, _ = update(
        policy,
        batch_of(rows),
        advantage="rloo",
        reference=copy.deepcopy(reference),
        kl_coefficient=0.3,
        max_tokens_per_micro_batch=max_tokens,
    )
    assert_close(got, gradient_of(policy, rows, term))


def test_the_penalty_teaches_rows_without_an_advantage(policy: Any, reference: Any) -> None:
    equal = scored(policy, [trajectory("a", r, 0.5) for r in range(2)])
    settings = {"advantage": "rloo", "reference": reference}
    got, _ = update(policy, batch_of(equal), kl_coefficient=0.3, **settings)
    assert max(float(g.abs().max()) for g in got.values()) > 1e-4
    watched, _ = update(policy, batch_of(equal), kl_coefficient=0.0, **settings)
    assert all(float(g.abs().max()) == 0 for g in watched.values())


def test_the_kl_penalty_in_the_reward(policy: Any, reference: Any, rows: list[Trajectory]) -> None:
    _, module = update(
        policy, batch_of(rows), advantage="rloo", reference=reference, kl_coefficient=0.01, kl_in="reward"
    )
    with torch.no_grad():
        divergence = [float((distributions(policy, r)[0] - distributions(reference, r)[0]).sum()) for r in rows]
    assert max(map(abs, divergence)) > 0.05
    rewards = [r.reward.total - 0.01 * d for r, d in zip(rows, divergence, strict=True) if r.reward]
    expected = [r - (sum(rewards) - r) / 2 for r in rewards]
    assert module.last_advantages is not None
    assert module.last_advantages.raw.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_penalty_in_the_reward_does_not_favour_rows_that_are_cut(policy: Any, reference: Any) -> None:
    rows = scored(policy, [trajectory("a", 0, 0.5), trajectory("a", 1, 0.5, fatal_step=1)])
    settings = {"advantage": "rloo", "reference": reference, "kl_coefficient": 0.1, "kl_in": "reward"}
    _, whole = update(policy, batch_of(rows), **settings)
    _, cut = update(policy, batch_of(rows, kept=[0, 1]), **settings)
    assert whole.last_advantages is not None and cut.last_advantages is not None
    assert float(whole.last_advantages.raw.abs().max()) > 1e-3
    torch.testing.assert_close(cut.last_advantages.raw, whole.last_advantages.raw)


def test_the_entropy_is_sought(policy: Any, rows: list[Trajectory]) -> None:
    def term(i: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return -(ADVANTAGES[i] * (logprobs - logprobs.detach()).exp() + 0.2 * entropy).mean()

    got, _ = update(policy, batch_of(rows), advantage="rloo", entropy_coefficient=0.2)
    assert_close(got, gradient_of(policy, rows, term))


def test_truncated_importance_weights_make_up_for_another_engine(policy: Any, rows: list[Trajectory]) -> None:
    generator = torch.Generator().manual_seed(5)
    shift = [0.5 * torch.randn(r.sampling_logprobs.shape, generator=generator) * (r.step_ids >= 0) for r in rows]
    engine = [replace(r, sampling_logprobs=r.sampling_logprobs - s) for r, s in zip(rows, shift, strict=True)]

    def term(i: int, logprobs: Tensor, _: Tensor) -> Tensor:
        weights = shift[i][rows[i].step_ids >= 0].exp().clamp(max=1.3)
        return -(weights * ADVANTAGES[i] * (logprobs - logprobs.detach()).exp()).mean()

    got, _ = update(policy, batch_of(engine), advantage="rloo", old_logprobs="policy", importance_cap=1.3)
    assert_close(got, gradient_of(policy, rows, term))


def test_the_mismatch_of_engine_and_trainer_is_logged(policy: Any, rows: list[Trajectory]) -> None:
    engine = [replace(r, sampling_logprobs=r.sampling_logprobs - 0.5) for r in rows]
    _, module = update(policy, batch_of(engine), advantage="rloo", old_logprobs="policy", importance_cap=1.3)
    figures = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    assert figures["train/mismatch"] == pytest.approx(0.5, abs=1e-4)
    assert figures["train/mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert figures["train/mismatch_kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-4)
    assert figures["train/importance_capped"] == 1.0
    assert figures["train/ratio_max_error"] < 1e-5


def test_updates_without_tokens_do_not_thin_the_figures_of_a_token(policy: Any) -> None:
    rows = scored(policy, [trajectory(task, r, 0.5 * r * (task == "b")) for task in "ab" for r in range(2)])
    rows = [replace(r, sampling_logprobs=r.sampling_logprobs - 0.5 * (r.step_ids >= 0)) for r in rows]
    settings = {"advantage": "rloo", "old_logprobs": "policy"}
    whole, apart = (
        update(policy, batch_of(rows), mini_batch_prompts=n, **settings)[1].trainer.callback_metrics for n in (None, 1)
    )
    assert whole["train/mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert whole["train/trained_tokens"] == sum(int((r.step_ids >= 0).sum()) for r in rows[2:])
    for name in ("entropy", "mismatch", "mismatch_kl", "mismatch_max", "trained_tokens"):
        assert float(apart[f"train/{name}"]) == pytest.approx(float(whole[f"train/{name}"]), rel=1e-5), name


@pytest.mark.parametrize("settings", [{}, {"kl_coefficient": 1e-9}, {"kl_coefficient": 1e-9, "kl_in": "reward"}])
def test_the_divergence_is_that_of_all_rows_wherever_its_penalty_stands(
    policy: Any, reference: Any, settings: dict[str, Any]
) -> None:
    rows = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("b", 0, 0.5)])
    _, module = update(policy, batch_of(rows), advantage="rloo", reference=copy.deepcopy(reference), **settings)
    with torch.no_grad():
        gaps = [distributions(reference, row)[0] - distributions(policy, row)[0] for row in rows]
    expected = sum(float((d.exp() - d - 1).mean()) for d in gaps) / 3
    assert float(module.trainer.callback_metrics["train/kl"]) == pytest.approx(expected, rel=1e-3)


def test_entropy_and_divergence_are_logged(policy: Any, reference: Any, rows: list[Trajectory]) -> None:
    _, module = update(policy, batch_of(rows), advantage="rloo", reference=reference)
    figures = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    with torch.no_grad():
        entropies = torch.cat([distributions(policy, row)[1] for row in rows])
        gaps = [distributions(reference, row)[0] - distributions(policy, row)[0] for row in rows]
    assert figures["train/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-4)
    means = [float((d.exp() - d - 1).mean()) for d in gaps]
    assert figures["train/kl"] == pytest.approx(sum(means) / len(means), rel=1e-3)


def test_fatal_rows_do_not_vote_against_the_non_fatal_baseline(policy: Any) -> None:
    batch = scored(
        policy,
        [trajectory("a", 0, 1.0), trajectory("a", 1, 0.5), trajectory("a", 2, 0.0, fatal_step=1, is_fatal=True)],
    )
    _, module = update(policy, batch_of(batch), advantage="rloo", baseline="non_fatal", clamp_fatal=False)
    assert module.last_advantages is not None
    assert module.last_advantages.advantages.tolist() == pytest.approx([0.5, -0.5, -0.75])


def test_a_reference_is_frozen_and_no_part_of_the_state(policy: Any, reference: Any, rows: list[Trajectory]) -> None:
    before = copy.deepcopy(reference.state_dict())
    _, module = update(policy, batch_of(rows), reference=reference, kl_coefficient=0.1)
    state = module.state_dict()
    assert state
    assert not [name for name in state if name.startswith("reference")]
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)
    fresh = FatalAwareGRPO(copy.deepcopy(policy), reference=copy.deepcopy(reference), kl_coefficient=0.1)
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh.state_dict(), state, atol=0, rtol=0)
    with pytest.raises(RuntimeError, match=r"policy\.lm_head|policy\.model"):
        fresh.load_state_dict({name: value for name, value in state.items() if "layers.0" not in name})


def test_routers_of_a_mixture_of_experts_are_balanced_beside_the_objective() -> None:
    policy = moe()
    rows = [replace(trajectory("a", r, float(r)), token_ids=torch.arange(20, 20 + 15 + r)) for r in range(2)]
    rows = scored(policy, [replace(r, step_ids=r.step_ids[: len(r.token_ids)]) for r in rows])
    plain, _ = update(policy, batch_of(rows), advantage="rloo")
    got, module = update(
        policy, batch_of(rows), advantage="rloo", router_aux_coefficient=0.01, router_z_coefficient=1e-3
    )
    figures = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    config = policy.config.text_config
    trained = copy.deepcopy(policy)
    with collect_router_logits(trained) as logits:
        batch = pack_rows(RolloutRows.of(batch_of(rows)), [0, 1], trained, trained.device)
        policy_logprobs(trained, batch, batch.step_ids >= 0)
    losses = router_losses(logits, config.num_experts, config.num_experts_per_tok, torch.ones_like(batch.input_ids))
    aux, z = losses.load_balancing_sum / losses.tokens, losses.z_sum / losses.tokens
    assert figures["train/router_aux"] == pytest.approx(float(aux.detach()), rel=1e-5)
    assert figures["train/router_z"] == pytest.approx(float(z.detach()), rel=1e-5)
    (0.01 * aux + 1e-3 * z).backward()
    for name, parameter in trained.named_parameters():
        added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got[name], plain[name] + added, atol=3e-6, rtol=1e-3)
    assert float(trained.model.language_model.layers[0].mlp.gate.weight.grad.abs().max()) > 1e-4


def test_trajectories_of_different_temperatures_are_refused(policy: Any, rows: list[Trajectory]) -> None:
    with pytest.raises(DataError, match=r"\[0\.5, 1\.0\]"):
        update(policy, batch_of([replace(rows[0], temperature=0.5), *rows[1:]]))
    with pytest.raises(DataError, match=r"\[0\.0, 1\.0\]"):
        update(policy, batch_of([replace(rows[0], temperature=0.0), *rows[1:]]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"kl_coefficient": 0.1}, "no reference"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"entropy_coefficient": math.nan}, "entropy_coefficient is nan"),
        ({"importance_cap": 2.0}, "old_logprobs"),
        ({"importance_cap": 0.5, "old_logprobs": "policy"}, "importance_cap is 0.5"),
        ({"baseline": "fatal"}, "baseline is 'fatal'"),
        ({"kl_in": "advantage"}, "kl_in is 'advantage'"),
        ({"router_z_coefficient": 0.1}, "has no router"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0"),
    ],
)
def test_impossible_settings(policy: Any, bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        FatalAwareGRPO(policy, **bad)


def test_the_policy_is_no_reference_of_its_own(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match="policy itself"):
        FatalAwareGRPO(policy, reference=policy, kl_coefficient=0.1)
