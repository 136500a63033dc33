"""Counted operations against those that torch counts while a real model runs."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from opensearch_lightning.models.flops import forward_flops, forward_flops_by_part, training_flops
from opensearch_lightning.models.shape import RELEASED, PolicyShape
from tests.models.test_router import moe
from tests.models.tiny import tiny_policy

LENGTH = 96
GRIDS = [(6, 8), (4, 4)]
PATCHES = [rows * columns for rows, columns in GRIDS]


def run(model: Any, *, backward: bool) -> int:
    """Operations that torch counts for one document with two images and logits at all of its positions."""
    vision = model.config.vision_config
    ids = torch.randint(10, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    start = 2
    for count in PATCHES:
        tokens = count // vision.spatial_merge_size**2
        ids[0, start : start + tokens] = model.config.image_token_id
        start += tokens + 3
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH).expand(3, 1, -1),
            pixel_values=torch.randn(sum(PATCHES), size),
            image_grid_thw=torch.tensor([(1, *grid) for grid in GRIDS]),
            use_cache=False,
        ).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def plain(model: Any) -> Any:
    """The model with attention and experts as matrix products, which are all that torch counts."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def hidden_half(shape: PolicyShape) -> float:
    """What the causal mask hides: torch counts the whole square."""
    return forward_flops_by_part(shape, lengths=[LENGTH], supervised=LENGTH, patches=PATCHES)["attended"]


@pytest.mark.parametrize("make", [tiny_policy, moe])
def test_a_forward_pass_needs_what_torch_counts(make: Any) -> None:
    model = plain(make())
    shape = PolicyShape.of(model.config)
    expected = forward_flops(shape, lengths=[LENGTH], supervised=LENGTH, patches=PATCHES) + hidden_half(shape)
    counted = run(model, backward=False)
    # torch counts more: the products of positions and frequencies, which are no part of the model's own
    assert expected == pytest.approx(counted, rel=0.005)
    assert expected <= counted


@pytest.mark.parametrize("make", [tiny_policy, moe])
def test_training_needs_three_times_that(make: Any) -> None:
    model = plain(make())
    shape = PolicyShape.of(model.config)
    whole = training_flops(shape, lengths=[LENGTH], supervised=LENGTH, patches=PATCHES) + 3 * hidden_half(shape)
    # pixels get no gradient, which spares one of the three products of the patch embedding
    spared = shape.vision.patch_embedding().flops * sum(PATCHES)
    assert whole - spared == pytest.approx(run(model, backward=True), rel=0.005)


def test_a_frozen_vision_tower_runs_forward_only() -> None:
    model = tiny_policy(attn_implementation="eager", train_vision=False)
    shape = PolicyShape.of(model.config)
    needed = training_flops(
        shape, lengths=[LENGTH], supervised=LENGTH, patches=PATCHES, frozen=["vision_tower", "projector"]
    )
    assert needed + 3 * hidden_half(shape) == pytest.approx(run(model, backward=True), rel=0.005)


def test_frozen_matrices_pass_gradients_through() -> None:
    model = tiny_policy(attn_implementation="eager", train_vision=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)
    shape = PolicyShape.of(model.config)
    frozen = ["vision_tower", "projector", "attention", "mlp"]
    needed = training_flops(shape, lengths=[LENGTH], supervised=LENGTH, patches=PATCHES, frozen=frozen)
    assert needed + 3 * hidden_half(shape) == pytest.approx(run(model, backward=True), rel=0.005)


def test_documents_and_images_are_counted_apart() -> None:
    shape = RELEASED["Qwen3-VL-8B-Instruct"]
    one = forward_flops_by_part(shape, lengths=[8000], supervised=0, patches=[1024])
    two = forward_flops_by_part(shape, lengths=[4000, 4000], supervised=0, patches=[512, 512])
    assert two["attended"] == one["attended"] / 2
    assert two["attended_patches"] == one["attended_patches"] / 2
    assert {part: flops for part, flops in two.items() if "attended" not in part} == {
        part: flops for part, flops in one.items() if "attended" not in part
    }


def test_the_8b_model_by_hand() -> None:
    shape = RELEASED["Qwen3-VL-8B-Instruct"]
    # 36 layers of 4096 · (4096 + 2 · 1024 + 4096) and 3 · 4096 · 12288 weights; 2 · 4096 · L² of causal attention
    matrices = 36 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 12_288)
    by_hand = 2 * matrices * 1000 + 36 * 2 * 4096 * 1000**2 + 2 * 4096 * 151_936 * 300
    assert forward_flops(shape, lengths=[1000], supervised=300, patches=[]) == by_hand
    assert training_flops(shape, lengths=[1000], supervised=300, patches=[]) == 3 * by_hand
