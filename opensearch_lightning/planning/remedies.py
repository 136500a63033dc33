"""What to change where a run does not fit: each change is counted, and named only if it helps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from opensearch_lightning.planning.clusters import CLUSTERS, Cluster
from opensearch_lightning.planning.figures import Assumptions, Figures
from opensearch_lightning.planning.memory import count_memory
from opensearch_lightning.planning.setup import Setup

Change = tuple[str, Setup]

_PARALLEL = (2, 4, 8)
_MOST_NODES = 64
_SHORTER = 4000


def remedies(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> list[str]:
    """Changes after which the run fits a GPU: single ones, else pairs and shorter trajectories, and larger GPUs.

    Each is a setting as it is typed, with the gigabytes that a GPU then needs.
    """

    def fits(change: Change) -> bool:
        return _fits(change[1], figures, cluster, assumed)

    found = list(filter(fits, _changes(setup))) or list(filter(fits, [*_pairs(setup), *_shorter(setup)]))
    told = [f"{name} would fit ({_peak(changed, figures, assumed) / 1e9:.1f} GB)" for name, changed in _firsts(found)]
    larger = [
        other.name
        for other in CLUSTERS.values()
        if other.memory > cluster.memory and _fits(setup, figures, other, assumed)
    ]
    return [*told, *([f"as it is, it fits {' and '.join(larger)}"] if larger else [])]


def _peak(setup: Setup, figures: Figures, assumed: Assumptions) -> float:
    return count_memory(setup, figures, reserve=assumed.reserve).peak


def _fits(setup: Setup, figures: Figures, cluster: Cluster, assumed: Assumptions) -> bool:
    return _peak(setup, figures, assumed) <= cluster.memory


def _changes(setup: Setup) -> Iterator[Change]:
    """Settings that take memory from a GPU, mildest first."""
    replace = dataclasses.replace
    zero = setup.zero
    if not setup.checkpointing:
        yield "model.policy.gradient_checkpointing=true", replace(setup, checkpointing=True)
    if setup.kind == "sft" and not setup.packed and setup.rows_per_pass > 1:
        yield "data.micro_batch=1", replace(setup, rows_per_pass=1)
    if setup.kind == "sft" and zero.stage and not setup.one_pass:
        yield from _one_pass(setup)
    if setup.kind == "grpo" and setup.max_tokens is not None and setup.max_tokens > setup.max_length:
        name = f"module.max_tokens_per_micro_batch={setup.max_length}"
        yield name, replace(setup, max_tokens=setup.max_length)
    if zero.stage != 3:
        yield "trainer=deepspeed", replace(setup, width=2, compute_width=2, zero=replace(zero, stage=3))
    if setup.kind == "grpo" and not setup.routers_taught:
        for size in _PARALLEL:
            if setup.sequence_parallel < size <= setup.ranks_per_node and _deals(setup, size):
                yield f"module.sequence_parallel_size={size}", replace(setup, sequence_parallel=size)
    if zero.stage == 3 and zero.optimizer_at == "gpu":
        offloaded = replace(zero, optimizer_at="cpu", weights_at="cpu")
        yield "trainer=deepspeed_offload", replace(setup, zero=offloaded)
    if zero.stage:
        nodes = setup.nodes * 2
        while nodes <= _MOST_NODES:
            yield f"trainer.num_nodes={nodes}", replace(setup, nodes=nodes)
            nodes *= 2
    if setup.trained.get("vision_tower"):
        frozen = {**setup.trained, "vision_tower": 0, "projector": 0}
        yield "model.policy.train_vision=false model.policy.train_projector=false", replace(setup, trained=frozen)


def _one_pass(setup: Setup) -> Iterator[Change]:
    """Updates of one pass on each rank, which need no whole gradients: of all rows padded, or of one full pack."""
    unlimited = "data.micro_batch=null data.max_tokens_per_pass=null"
    if not setup.packed:
        whole = dataclasses.replace(setup, rows_per_pass=setup.rows_per_rank, max_tokens=None)
        yield f"module.micro_batch=null {unlimited}", whole
    tokens = setup.max_tokens if setup.packed else None
    pack = dataclasses.replace(
        setup, packed=True, full_packs=True, rows_per_rank=1, max_tokens=tokens or setup.max_length
    )
    name = "data.packing=tokens data.batch_size=1"
    yield name if setup.packed else f"{name} {unlimited}", pack


def _pairs(setup: Setup) -> Iterator[Change]:
    """Two changes of different settings; the second may shorten trajectories."""
    for first, changed in _changes(setup):
        for second, both in _changes(changed):
            if first.partition("=")[0] < second.partition("=")[0]:
                yield f"{first} {second}", both
        for second, both in _shorter(changed):
            yield f"{first} {second}", both


def _shorter(setup: Setup) -> Iterator[Change]:
    for length in range((setup.max_length - 1) // _SHORTER * _SHORTER, setup.max_prompt, -_SHORTER):
        yield _shortened(setup, length)


def _shortened(setup: Setup, length: int) -> Change:
    """Trajectories and passes of at most ``length`` tokens."""
    names = [f"data.max_length={length}"]
    if setup.kind == "grpo":
        names = [f"callbacks.rollout_generation.max_response_tokens={length - setup.max_prompt}"]
    tokens = setup.max_tokens
    if tokens is not None and tokens > length:
        tokens = length
        limit = "pack_tokens" if setup.packed else "max_tokens_per_pass"
        names.append(
            f"module.max_tokens_per_micro_batch={length}" if setup.kind == "grpo" else f"data.{limit}={length}"
        )
    return " ".join(names), dataclasses.replace(setup, max_length=length, max_tokens=tokens)


def _deals(setup: Setup, size: int) -> bool:
    """Whether groups and heads come out even, as ``SequenceParallel`` sees it."""
    heads, kv_heads = setup.shape.heads, setup.shape.kv_heads
    even = setup.ranks_per_node % size == 0 and heads % size == 0
    return even and (kv_heads % size == 0 or size % kv_heads == 0)


def _firsts(found: Sequence[Change]) -> list[Change]:
    """Of changes of the same settings the first, which is the smallest."""
    by_settings = itertools.groupby(
        sorted(found, key=lambda change: _settings(change[0])), key=lambda change: _settings(change[0])
    )
    firsts = {next(iter(group))[0] for _, group in by_settings}
    return [change for change in found if change[0] in firsts]


def _settings(name: str) -> tuple[str, ...]:
    return tuple(part.partition("=")[0] for part in name.split())
