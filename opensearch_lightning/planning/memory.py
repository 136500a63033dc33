"""Memory of a GPU and of a node, item by item, as the modules and DeepSpeed allocate it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opensearch_lightning.planning.activations import saved_bytes
from opensearch_lightning.planning.figures import Figures
from opensearch_lightning.planning.setup import Setup

_FLOAT32 = 4
_MASTER_AND_MOMENTS = 3 * _FLOAT32
_LOGIT_ROWS, _LOGIT_COLUMNS = 1024, 16_384
"""Positions and tokens of a tile of logits; see ``models.policy`` and ``algorithms.tiled_logprobs``."""

Moment = Literal["always", "pass", "update", "rollout"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes for one purpose: at all times, or while a pass, the optimizer's step or rollouts run."""

    name: str
    bytes: float
    when: Moment = "always"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one GPU and one node hold.

    Attributes:
        gpu: items of a training GPU.
        node: items of a node's main memory.
        reserve: bytes of a GPU that a program does not get.
    """

    gpu: Sequence[Item]
    node: Sequence[Item]
    reserve: float

    @property
    def peak(self) -> float:
        """Most bytes of a GPU at one moment, the reserve among them."""

        def at(moment: Moment) -> float:
            return sum(item.bytes for item in self.gpu if item.when == moment)

        return at("always") + max(at("pass"), at("update"), at("rollout")) + self.reserve

    @property
    def node_peak(self) -> float:
        """Most bytes of a node's main memory: what a start needs, or what training keeps there."""
        starting = sum(item.bytes for item in self.node if item.when == "pass")
        kept = sum(item.bytes for item in self.node if item.when == "always")
        return max(starting, kept)


def count_memory(setup: Setup, figures: Figures, *, reserve: float = 4e9) -> Memory:
    """Memory of a run.

    The largest pass counts: as many tokens as the configuration allows, with images in proportion.

    Args:
        setup: the run.
        figures: of its trajectories.
        reserve: bytes of a GPU for CUDA's context, NCCL and fragmentation.
    """
    state = _zero_state(setup) if setup.zero.stage else _plain_state(setup)
    gpu = [*state, *_pass_items(setup, figures), *_sampling(setup)]
    return Memory(gpu=[item for item in gpu if item.bytes], node=_node(setup), reserve=reserve)


def _plain_state(setup: Setup) -> list[Item]:
    """One process or DDP: moments have the type of the weights, and gradients stay between steps."""
    # adapters are float32 beside a policy of half precision
    trained = (max(setup.width, _FLOAT32) if setup.adapters else setup.width) * setup.trained_total
    adapters = trained if setup.adapters else 0
    items = [
        Item(name="weights", bytes=setup.width * setup.shape.total + adapters),
        Item(name="gradients", bytes=trained),
        Item(name="optimizer moments", bytes=2 * trained),
        Item(name="the optimizer's own step", bytes=trained, when="update"),
    ]
    if setup.reference:
        items.insert(1, Item(name="reference weights", bytes=setup.width * setup.shape.total))
    if setup.ranks > 1:
        items.append(Item(name="gradient buckets of DDP", bytes=trained))
    return items


def _zero_state(setup: Setup) -> list[Item]:
    """DeepSpeed: weights whole (2) or in parts (3), everything of the optimizer in parts."""
    zero, ranks = setup.zero, setup.ranks
    parts = ranks if zero.stage == 3 else 1
    on_gpu = zero.optimizer_at == "gpu"
    trained = setup.trained_total
    part = trained / ranks
    buckets = 2 if zero.stage == 2 and zero.overlap else 1
    items = [
        Item(name="weights", bytes=setup.width * setup.parameters / parts * (zero.weights_at == "gpu")),
        Item(
            name="reference weights",
            bytes=setup.reference * setup.width * setup.shape.total / parts * (zero.weights_at == "gpu"),
        ),
        Item(name="float32 weights of the optimizer", bytes=_FLOAT32 * part * on_gpu),
        Item(name="optimizer moments", bytes=2 * _FLOAT32 * part * on_gpu),
        Item(name="gradients, shared", bytes=setup.width * part * on_gpu),
        _gradients_in_a_pass(setup),
        Item(name="reduction buckets", bytes=setup.width * buckets * zero.reduce_bucket),
        # gradients in float32, and the roots of the second moments
        Item(name="the optimizer's own step", bytes=2 * _FLOAT32 * part * on_gpu, when="update"),
    ]
    if zero.stage == 3:
        live = min(zero.max_live, setup.parameters)
        items.append(Item(name="gathered weights", bytes=setup.width * live, when="pass"))
    else:
        gathered = min(zero.gather_bucket, trained)
        items.append(Item(name="gathered weights", bytes=setup.width * gathered, when="update"))
    return items


def _gradients_in_a_pass(setup: Setup) -> Item:
    """Beside buckets; those of several passes are added up whole before they are shared (``modules.accumulate``)."""
    trained, largest = setup.trained_total, setup.largest_trained
    if not setup.one_pass:
        return Item(name="gradients of an update, whole", bytes=setup.width * trained, when="pass")
    # one just computed, or waiting because it is larger than a bucket, and the copy of a bucket that ranks exchange
    copied = min(trained, max(setup.zero.reduce_bucket, largest))
    return Item(name="gradients on their way", bytes=setup.width * (largest + copied), when="pass")


def _pass_items(setup: Setup, figures: Figures) -> list[Item]:
    tokens, patches = pass_size(setup, figures)
    supervised = math.ceil(tokens * figures.sampled_tokens / figures.mean_tokens)
    kept = saved_bytes(
        setup.shape,
        tokens=tokens,
        patches=patches,
        width=setup.compute_width,
        checkpointing=setup.checkpointing,
    )
    hidden = supervised * setup.shape.hidden * 2 * setup.compute_width
    return [
        Item(name=f"activations of {tokens:,} tokens", bytes=kept + hidden, when="pass"),
        Item(name="logits", bytes=_logits(setup, supervised), when="pass"),
    ]


def pass_size(setup: Setup, figures: Figures) -> tuple[int, int]:
    """Tokens and patches of the largest pass on one rank; ranks that read a row together all read its images."""
    tokens = setup.pass_tokens
    images = tokens * setup.sequence_parallel / figures.mean_tokens * figures.images_per_row
    return tokens, math.ceil(images * figures.patches_of_image(setup.shape.vision.patch))


def _logits(setup: Setup, supervised: int) -> float:
    rows, shape = min(_LOGIT_ROWS, supervised), setup.shape
    if setup.zero.stage == 3:
        # the layer is called, whole rows of logits at a time: as it makes them, their gradient, and in float32 scaled,
        # shifted and exponentiated; more with an entropy
        copies = 7 if setup.kind == "grpo" else 4
        return rows * shape.vocabulary * (copies * _FLOAT32 + 2 * setup.compute_width)
    # a tile and its like for the entropy, its part of the matrix, and the gradient of the matrix, all in float32
    tiles = 2 if setup.kind == "grpo" else 1
    columns = min(_LOGIT_COLUMNS, shape.vocabulary)
    matrix = shape.hidden * (columns + shape.vocabulary * bool(setup.trained.get("output_layer") or shape.tied))
    return _FLOAT32 * (tiles * rows * columns + matrix)


def _sampling(setup: Setup) -> list[Item]:
    """Of an engine in the training process: its cache, and its own copy of the weights."""
    cache = setup.cache_tokens * setup.shape.cache_values * setup.compute_width
    return [
        Item(name="weights to sample from", bytes=setup.own_weights * setup.width * setup.parameters),
        Item(name="cache of rollouts", bytes=cache, when="rollout"),
    ]


def _node(setup: Setup) -> list[Item]:
    """Main memory: ``pass`` marks what is gone when training begins."""
    zero, local = setup.zero, setup.ranks_per_node
    part = setup.trained_total / setup.ranks
    models = 1 + setup.reference
    items = [
        Item(name="loading, a policy a rank", bytes=local * models * setup.width * setup.parameters, when="pass"),
    ]
    if zero.stage and zero.optimizer_at == "cpu":
        # with gradients as they are shared, and once more in float32 for the step
        optimizer = local * part * (_MASTER_AND_MOMENTS + setup.width + _FLOAT32)
        items.append(Item(name="optimizer state", bytes=optimizer))
    if zero.stage and zero.weights_at == "cpu":
        weights = local * models * setup.width * setup.parameters / setup.ranks
        items.append(Item(name="weights", bytes=weights))
    if setup.kind == "grpo" and setup.servers:
        items.append(Item(name="new weights for the server", bytes=2 * setup.parameters))
    return items
