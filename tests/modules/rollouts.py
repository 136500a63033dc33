"""Trajectories of random tokens, scored by a policy, and what one update does to it."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from opensearch_lightning.chat import collate
from opensearch_lightning.models import policy_logprobs
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.types import (
    NON_FATAL,
    RewardParts,
    RolloutBatch,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
)


def trajectory(
    task: str,
    rollout: int,
    reward: float | None,
    *,
    fatal_step: int = NON_FATAL,
    is_fatal: bool | None = None,
    steps: int = 3,
) -> Trajectory:
    """Random tokens; three prompt tokens, then steps of four tokens with an observation token behind each."""
    generator = torch.Generator().manual_seed(ord(task) * 100 + rollout)
    step_ids = [-1] * 3
    for step in range(steps):
        step_ids += [step] * (3 + rollout % 2) + [-1]
    count = len(step_ids)
    return Trajectory(
        task_id=task,
        rollout=rollout,
        steps=(),
        images=(),
        token_ids=torch.randint(300, 400, (count,), generator=generator),
        step_ids=torch.tensor(step_ids),
        sampling_logprobs=torch.zeros(count),
        stop_reason=StopReason.RESPONSE,
        fatal_step=fatal_step,
        is_fatal=fatal_step < NON_FATAL if is_fatal is None else is_fatal,
        reward=None if reward is None else RewardParts(total=reward, format=1.0, accuracy=reward, query=0.0),
    )


def scored(policy: Any, rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The same, with sampling log-probabilities of this policy."""
    out = []
    for row in rows:
        batch = collate([row], pad_id=0, image_token_id=policy.config.image_token_id, merge_size=2)
        with torch.no_grad():
            logprobs, _ = policy_logprobs(policy, batch, batch.step_ids >= 0)
        out.append(replace(row, sampling_logprobs=logprobs[0]))
    return out


def batch_of(rows: Sequence[Trajectory], kept: Sequence[int] | None = None) -> RolloutBatch:
    """Groups by task in order of appearance; ``kept`` in the order of ``rows``."""
    names = list(dict.fromkeys(row.task_id for row in rows))
    groups = []
    for name in names:
        places = [i for i, row in enumerate(rows) if row.task_id == name]
        groups.append(
            TrajectoryGroup(
                task=Task(id=name, question="", answer="", images=()),
                trajectories=tuple(rows[i] for i in places),
                kept_steps=None if kept is None else tuple(kept[i] for i in places),
            )
        )
    return RolloutBatch(tasks=[group.task for group in groups], groups=groups)


def one_process(*, max_steps: int) -> L.Trainer:
    """A trainer on the CPU that writes and prints nothing."""
    return L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


def update(policy: Any, batch: RolloutBatch, **settings: Any) -> tuple[dict[str, torch.Tensor], FatalAwareGRPO]:
    """What one step of plain SGD with rate 1 takes from each parameter: the gradients."""
    trained = copy.deepcopy(policy)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    settings = {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "max_grad_norm": None,
    } | settings
    module = FatalAwareGRPO(trained, **settings)
    one_process(max_steps=1).fit(module, DataLoader([batch], batch_size=None))
    return {name: before[name] - p.detach() for name, p in trained.named_parameters()}, module
