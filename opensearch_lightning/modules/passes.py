"""Forward passes over the rows of a batch: which rows go together, as what tensors, and what a model makes of them.

Shapes: ``B`` rows of a pass, ``T`` tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from opensearch_lightning.chat import PackedBatch, pack, plan_packs
from opensearch_lightning.models import SequenceParallel, policy_logprobs
from opensearch_lightning.modules.accumulation import agree_on_passes
from opensearch_lightning.modules.rollout_rows import RolloutRows

Logprobs = dict[int, Tensor]
"""Log-probabilities ``[T]`` of the tokens of rows, by row, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class KnownLogprobs:
    """What is known of each row before a step's updates: under the policy as it was, the engine, and a reference."""

    old: Logprobs
    sampling: Logprobs
    reference: Logprobs | None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Rows of one forward pass. An idle one only keeps step with other ranks: none of its tokens count."""

    rows: list[int]
    idle: bool = False


def plan_passes(
    rows: RolloutRows, chosen: Sequence[int], max_tokens: int, model: Any, trainer: L.Trainer
) -> list[Pass]:
    """``chosen`` in passes of ``max_tokens`` tokens; at least one, and as many as the strategy needs on every rank."""
    plan = plan_packs([rows.trajectories[row] for row in chosen], max_tokens, **_image_tokens(model))
    passes = [Pass(rows=[chosen[place] for place in places]) for places in plan]
    shortest = min(range(len(rows.trajectories)), key=lambda row: len(rows.trajectories[row].token_ids))
    # every rank makes at least one backward pass: the last one carries the gradients between them
    wanted = agree_on_passes(trainer, max(1, len(passes)))
    return passes + [Pass(rows=[shortest], idle=True)] * (wanted - len(passes))


def pass_tokens(rows: RolloutRows, one: Pass) -> int:
    """Tokens of a pass that carry gradient."""
    return 0 if one.idle else sum(rows.kept_tokens(row) for row in one.rows)


def pack_rows(rows: RolloutRows, chosen: Sequence[int], model: Any, device: torch.device) -> PackedBatch:
    """``chosen`` as one packed batch for ``model``."""
    return pack([rows.trajectories[row] for row in chosen], **_image_tokens(model)).to(device)


def sampling_logprobs(rows: RolloutRows) -> Logprobs:
    """What the engine gave to the tokens of each row when it sampled them."""
    return {row: trajectory.sampling_logprobs for row, trajectory in enumerate(rows.trajectories)}


@torch.no_grad()
def score_rows(
    model: nn.Module,
    rows: RolloutRows,
    passes: Sequence[Pass],
    device: torch.device,
    parallel: SequenceParallel | None = None,
) -> Logprobs:
    """What ``model`` gives to the sampled tokens of the rows of ``passes``; 0 at all others."""
    scores: Logprobs = {}
    for one in passes:
        batch = pack_rows(rows, one.rows, model, device)
        logprobs_BT, _ = policy_logprobs(
            model, batch, batch.step_ids >= 0, temperature=rows.temperature, sequence_parallel=parallel
        )
        for position, row in enumerate(one.rows):
            scores[row] = logprobs_BT[position, : len(rows.trajectories[row].token_ids)].cpu()
    return scores


def _image_tokens(model: Any) -> dict[str, int]:
    config = model.config
    return {"image_token_id": config.image_token_id, "merge_size": config.vision_config.spatial_merge_size}


def padded(values: Sequence[Tensor], filler: float = 0.0) -> Tensor:
    """Rows of different lengths as ``[B, T]``."""
    return nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=filler)
