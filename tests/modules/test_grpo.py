"""FatalAwareGRPO on trajectories from anywhere: no engine, tool or callback takes part."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.types import NON_FATAL, RolloutBatch, Trajectory
from tests.models.tiny import tiny_policy
from tests.modules.rollouts import batch_of, one_process, scored, trajectory, update


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_policy()


def by_hand(
    policy: Any, rows: Sequence[Trajectory], advantages: Sequence[float], kept: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Gradient of Eq. 12 at ratio 1, one row at a time with a full log-softmax."""
    trained = copy.deepcopy(policy)
    total = torch.zeros(())
    forbidden = [
        trained.config.image_token_id,
        trained.config.video_token_id,
        trained.config.vision_start_token_id,
        trained.config.vision_end_token_id,
    ]
    for row, advantage, limit in zip(rows, advantages, kept, strict=True):
        logits = trained(input_ids=row.token_ids[None], use_cache=False).logits[0, :-1]
        logits[:, forbidden] = -torch.inf
        logprobs = logits.log_softmax(-1).gather(1, row.token_ids[1:, None])[:, 0]
        mask = ((row.step_ids >= 0) & (row.step_ids < limit))[1:]
        if mask.any():
            # at ratio 1 the gradient of the ratio is that of the log-probability
            total = total - advantage * logprobs[mask].mean() / len(rows)
    total.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.named_parameters()}


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, two[name], atol=atol, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_the_update_is_the_gradient_of_the_objective(policy: Any) -> None:
    rows = scored(
        policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("a", 2, 0.0), trajectory("a", 3, 0.0)]
    )
    gradients, module = update(policy, batch_of(rows), advantage="rloo", clamp_fatal=True)
    assert module.last_advantages is not None
    assert module.last_advantages.advantages.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert_close(gradients, by_hand(policy, rows, [1, -1 / 3, -1 / 3, -1 / 3], [NON_FATAL] * 4))
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-4


def test_only_kept_steps_are_trained(policy: Any) -> None:
    rows = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])
    gradients, _ = update(policy, batch_of(rows, kept=[1, 2]), advantage="rloo")
    assert_close(gradients, by_hand(policy, rows, [1, -1], [1, 2]))


def test_a_fatal_row_below_the_mean_gives_no_gradient_and_keeps_its_vote(policy: Any) -> None:
    rows = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.5), trajectory("a", 2, 0.0, fatal_step=2)])
    gradients, _ = update(policy, batch_of(rows, kept=[NON_FATAL, NON_FATAL, 2]), advantage="rloo")
    assert_close(gradients, by_hand(policy, rows, [0.75, 0.0, 0.0], [NON_FATAL, NON_FATAL, 2]))


def test_a_fatal_row_above_the_mean_is_trained_on_its_prefix(policy: Any) -> None:
    rows = scored(policy, [trajectory("a", 0, 0.0), trajectory("a", 1, 1.0, fatal_step=1)])
    gradients, _ = update(policy, batch_of(rows, kept=[NON_FATAL, 1]), advantage="rloo")
    assert_close(gradients, by_hand(policy, rows, [-1, 1], [NON_FATAL, 1]))


def test_without_the_clamp_a_fatal_row_is_punished(policy: Any) -> None:
    rows = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, fatal_step=2)])
    gradients, _ = update(policy, batch_of(rows, kept=[NON_FATAL, 2]), advantage="rloo", clamp_fatal=False)
    assert_close(gradients, by_hand(policy, rows, [1, -1], [NON_FATAL, 2]))


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_micro_batches_change_nothing(policy: Any, aggregation: str) -> None:
    rows = scored(policy, [trajectory(t, r, float(r == 0), steps=1 + r) for t in "ab" for r in range(4)])
    whole, _ = update(policy, batch_of(rows), aggregation=aggregation)
    parts, _ = update(policy, batch_of(rows), aggregation=aggregation, max_tokens_per_micro_batch=20)
    assert_close(whole, parts)


def test_groups_are_formed_by_task_and_not_by_position(policy: Any) -> None:
    rows = scored(
        policy, [trajectory("a", 0, 1.0), trajectory("b", 0, 0.0), trajectory("a", 1, 0.0), trajectory("b", 1, 0.0)]
    )
    _, module = update(policy, batch_of(rows), advantage="rloo")
    record = module.last_advantages
    assert record is not None
    found = {(t.task_id, t.rollout): float(a) for t, a in zip(record.trajectories, record.advantages, strict=True)}
    assert found == {("a", 0): 1.0, ("a", 1): -1.0, ("b", 0): 0.0, ("b", 1): 0.0}


def test_rows_without_a_reward_do_not_vote(policy: Any) -> None:
    kept = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])
    unjudged = scored(policy, [trajectory("a", 2, None)])
    with_it, module = update(policy, batch_of([*kept, *unjudged]), advantage="grpo")
    without, _ = update(policy, batch_of(kept), advantage="grpo")
    assert_close(with_it, without)
    assert module.last_advantages is not None
    assert module.last_advantages.valid.tolist() == [True, True, False]


def test_equal_rewards_move_nothing(policy: Any) -> None:
    rows = scored(policy, [trajectory("a", r, 0.9) for r in range(3)])
    gradients, _ = update(policy, batch_of(rows))
    assert all(float(g.abs().max()) == 0 for g in gradients.values())


def test_one_update_for_each_mini_batch_of_prompts(policy: Any) -> None:
    rows = scored(policy, [trajectory(t, r, float(r)) for t in "abc" for r in range(2)])
    module = FatalAwareGRPO(copy.deepcopy(policy), mini_batch_prompts=2, lr=1e-4)
    trainer = one_process(max_steps=2)
    trainer.fit(module, DataLoader([batch_of(rows)] * 3, batch_size=None))
    # three prompts in mini-batches of two are two updates, and max_steps counts updates
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 1


def test_old_logprobs_of_the_policy_stand_in_for_an_engine_that_differs(policy: Any) -> None:
    rows = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)]
    from_policy, _ = update(policy, batch_of(rows), old_logprobs="policy")
    from_engine, _ = update(policy, batch_of(scored(policy, rows)))
    assert_close(from_policy, from_engine)


def test_a_step_without_any_reward_is_no_update(policy: Any) -> None:
    with pytest.raises(DataError, match="judge"):
        update(policy, batch_of([trajectory("a", 0, None), trajectory("a", 1, None)]))


def test_prompts_without_rewards_make_no_update(policy: Any) -> None:
    scored_rows = scored(policy, [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])
    unjudged = scored(policy, [trajectory("b", 0, None), trajectory("b", 1, None)])
    mixed, _ = update(policy, batch_of([*unjudged, *scored_rows]), mini_batch_prompts=1)
    alone, _ = update(policy, batch_of(scored_rows), mini_batch_prompts=1)
    assert_close(mixed, alone)


def test_a_batch_nobody_filled_is_refused(policy: Any) -> None:
    with pytest.raises(DataError, match="RolloutGeneration"):
        update(policy, RolloutBatch(tasks=[]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"clip": (0.2,)}, "clip"),
        ({"clip": (1.5, 0.2)}, "clip"),
        ({"mini_batch_prompts": 0}, "mini_batch_prompts"),
        ({"old_logprobs": "engine"}, "old_logprobs"),
    ],
)
def test_impossible_settings(policy: Any, bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        FatalAwareGRPO(policy, **bad)


def _of(row: Trajectory, **fields: Any) -> Trajectory:
    return replace(row, **{name: change(getattr(row, name)) for name, change in fields.items()})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling_logprobs": lambda values: values[:-3]}, r"rollout 1 of task 'a' .* 15 sampling log-probabilities"),
        ({"step_ids": lambda ids: ids[:-1]}, "17 step ids"),
        (dict.fromkeys(("token_ids", "step_ids", "sampling_logprobs"), lambda values: values[:0]), "0 tokens"),
        ({"sampling_logprobs": lambda values: values.index_fill(0, torch.tensor([4]), math.nan)}, "of nan"),
        ({"sampling_logprobs": lambda values: values.index_fill(0, torch.tensor([4]), -math.inf)}, "of -inf"),
        ({"reward": lambda reward: replace(reward, total=math.nan)}, "reward of rollout 1 of task 'a' is nan"),
        ({"temperature": lambda _: math.nan}, "temperature=nan"),
    ],
)
def test_trajectories_that_cannot_be(policy: Any, fields: dict[str, Any], named: str) -> None:
    rows = [trajectory("a", 0, 1.0), _of(trajectory("a", 1, 0.0), **fields)]
    if "temperature" in fields:
        rows = rows[1:]
        rows = [*rows, replace(rows[0], rollout=0, reward=trajectory("a", 0, 1.0).reward)]
    with pytest.raises((DataError, ConfigurationError), match=named):
        update(policy, batch_of(rows))


def test_each_trajectory_has_its_kept_steps(policy: Any) -> None:
    batch = batch_of([trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])
    batch.groups[:] = [replace(batch.groups[0], kept_steps=(1,))]
    with pytest.raises(DataError, match="group 'a' has 2 trajectories but 1 kept steps"):
        update(policy, batch)


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_a_weight(policy: Any) -> None:
    broken = copy.deepcopy(policy)
    with torch.no_grad():
        broken.lm_head.weight[300] = math.nan
    module = FatalAwareGRPO(broken, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    before = broken.model.language_model.norm.weight.detach().clone()
    rows = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)]
    with pytest.raises(DataError, match="gradient norm of update 0 is nan"):
        trainer.fit(module, DataLoader([batch_of(rows)], batch_size=None))
    torch.testing.assert_close(broken.model.language_model.norm.weight.detach(), before, atol=0, rtol=0)
