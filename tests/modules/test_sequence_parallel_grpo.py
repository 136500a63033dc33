"""GRPO of ranks that read rows in pairs, against one process: one fork does the work, the tests look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from opensearch_lightning.chat import TokenizedSample
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.types import Trajectory
from tests.models.tiny import tiny_checkpoint, tiny_policy
from tests.modules.rollouts import batch_of, scored, trajectory
from tests.packed import image, run
from tests.strategies.cpu_ranks import on_ranks, trainer, without_shared_memory
from tests.strategies.test_zero import Shares, Weights, furthest, weights_of

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")

RANKS = 4
Step = tuple[list[Trajectory], ...]
LOGGED = ("train/loss", "train/trained_tokens", "train/entropy", "train/kl", "train/mismatch", "train/grad_norm")


class Figures(L.Callback):
    """Keeps what each step logs."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append([float(trainer.callback_metrics[name]) for name in LOGGED])


def sgd(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def group(task: str, samples: Sequence[TokenizedSample]) -> list[Trajectory]:
    """Rollouts of one task, of which the first is right."""
    return [
        replace(
            trajectory(task, number, float(number == 0)),
            token_ids=sample.token_ids,
            step_ids=sample.step_ids,
            images=sample.images,
        )
        for number, sample in enumerate(samples)
    ]


def rollouts() -> list[Step]:
    """Two steps of four ranks with a task each: with pictures in the prompt, behind it, and none."""
    prompt, late = image(1), image(2, 4, 4)
    tasks = {
        "a": [run(0, [3, prompt, 5], [6], [4]), run(1, [3, prompt, 5], [5, late, 3], [4])],
        "b": [run(2, [7], [5]), run(3, [7], [9, 2], [4])],
        "c": [run(4, [6], [8], [late, 5]), run(5, [6], [3]), run(6, [6], [4])],
        "d": [run(7, [prompt, 4], [6]), run(8, [prompt, 4], [11, 3])],
    }
    rows = {task: scored(tiny_policy(), group(task, samples)) for task, samples in tasks.items()}
    return [tuple(rows[task] for task in order) for order in ("abcd", "cdba")]


def fit(name: str, size: int, steps: Sequence[Step]) -> tuple[Weights, list[list[float]], int]:
    """Trains on the steps; the weights, what was logged, and the trajectories that the last step was made of."""
    figures = Figures()
    # of four tasks two updates, each in several passes; all that takes log-probabilities takes part
    module = FatalAwareGRPO(
        tiny_policy(),
        reference=tiny_policy(),
        kl_coefficient=0.1,
        entropy_coefficient=0.01,
        old_logprobs="policy",
        optimizer=partial(sgd, lr=0.1),
        max_grad_norm=None,
        mini_batch_prompts=2,
        max_tokens_per_micro_batch=40,
        aggregation="token-mean",
        sequence_parallel_size=size,
    )
    updates = 2 * len(steps)
    trainer(name, updates, figures, devices=RANKS).fit(module, datamodule=Shares(steps, batch_of))
    assert module.last_advantages is not None
    return weights_of(module.policy), figures.seen, len(module.last_advantages.trajectories)


def work(steps: Sequence[Step]) -> dict[str, Any]:
    without_shared_memory()
    done: dict[str, Any] = {name: fit(name, 2, steps) for name in ("ddp", "zero3")}
    with pytest.raises(ConfigurationError) as caught:
        fit("ddp", 4, steps)
    return done | {"heads": str(caught.value)}


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return rollouts()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]) -> list[dict[str, Any]]:
    tiny_checkpoint()
    return on_ranks(partial(work, steps), tmp_path_factory.mktemp("ulysses"), ranks=RANKS)


@pytest.fixture(scope="module")
def alone(steps: list[Step]) -> tuple[Weights, list[list[float]], int]:
    # each pair of ranks gives one of its two tasks to each update
    return fit("one", 1, [(one, three, two, four) for one, two, three, four in steps])


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_pairs_of_ranks_end_where_one_process_does(ranks: Any, alone: Any, steps: Any, name: str) -> None:
    weights, figures, _ = alone
    assert furthest(weights, dict(tiny_policy().named_parameters())) > 1e-3, "nothing was trained"
    for number, rank in enumerate(ranks):
        got, got_figures, n_trajectories = rank[name]
        assert furthest(got, weights) < 1e-5
        assert len(figures) == len(steps)
        for one, other in zip(got_figures, figures, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        pair = number - number % 2
        assert n_trajectories == sum(map(len, steps[-1][pair : pair + 2]))


def test_heads_that_cannot_be_shared_are_refused_before_training(ranks: Any) -> None:
    for rank in ranks:
        assert "2 heads and 1 key-value heads, which 4 sequence-parallel ranks cannot share" in rank["heads"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"sequence_parallel_size": 0}, "sequence_parallel_size is 0"),
        ({"sequence_parallel_size": 2, "router_aux_coefficient": 0.1}, "router_aux_coefficient"),
        ({"sequence_parallel_size": 2, "router_z_coefficient": 0.1}, "router_z_coefficient"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        FatalAwareGRPO(tiny_policy(), **settings)


def test_ranks_that_make_no_whole_groups_are_refused_before_training() -> None:
    module = FatalAwareGRPO(tiny_policy(), sequence_parallel_size=2)
    module.trainer = trainer("one", 1)
    with pytest.raises(ConfigurationError, match=r"size of 2 does not fit 1 rank\(s\).*trainer.devices"):
        module.setup("fit")
