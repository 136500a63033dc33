"""Counted activations against what autograd saves of real models."""

from typing import Any

import pytest
import torch

from opensearch_lightning.models.shape import RELEASED, PolicyShape
from opensearch_lightning.planning.activations import saved_bytes
from tests.models.test_router import moe
from tests.models.tiny import tiny_policy


def measured(model: Any, length: int, grids: list[tuple[int, int]]) -> int:
    """Bytes of all storages that are saved for the backward pass, those of parameters left out."""
    vision = model.config.vision_config
    ids = torch.randint(30, 60, (1, length), generator=torch.Generator().manual_seed(0))
    start = 2
    for rows, columns in grids:
        tokens = rows * columns // vision.spatial_merge_size**2
        ids[0, start : start + tokens] = model.config.image_token_id
        start += tokens + 3
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # held, so that no other tensor gets its address
            saved[storage.data_ptr()] = storage
        return tensor

    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.model(
            input_ids=ids,
            position_ids=torch.arange(length).expand(3, 1, -1),
            pixel_values=torch.randn(sum(rows * columns for rows, columns in grids), size),
            image_grid_thw=torch.tensor([(1, *grid) for grid in grids]),
            use_cache=False,
        )
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "within"), [(tiny_policy, 0.03), (moe, 0.12)])
@pytest.mark.parametrize(("length", "grids"), [(96, [(6, 8), (4, 4)]), (512, [(4, 4)]), (100, [(16, 16)])])
def test_a_pass_keeps_what_autograd_saves(
    make: Any, within: float, dtype: torch.dtype, length: int, grids: list[tuple[int, int]]
) -> None:
    model = make().to(dtype).train()
    if make is moe:
        model.set_experts_implementation("eager")
    counted = saved_bytes(
        PolicyShape.of(model.config),
        tokens=length,
        patches=sum(rows * columns for rows, columns in grids),
        width=dtype.itemsize,
        checkpointing=False,
    )
    # routing has indices and weights of its own, which matter beside experts as tiny as these
    assert counted == pytest.approx(measured(model, length, grids), rel=within)


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    model = tiny_policy(gradient_checkpointing=True).train()
    shape = PolicyShape.of(model.config)
    kept = measured(model, 512, [(16, 16)])
    both = saved_bytes(shape, tokens=512, patches=256, width=4, checkpointing=True)
    everything = saved_bytes(shape, tokens=512, patches=256, width=4, checkpointing=False)
    # in the forward pass; the layer that is computed again comes on top in the backward pass
    assert kept < both < everything
    inputs = 4 * (512 * shape.layers * shape.hidden + 256 * shape.vision.depth * shape.vision.hidden)
    assert kept > inputs


def test_the_8b_model_by_hand() -> None:
    shape = RELEASED["Qwen3-VL-8B-Instruct"]
    bytes_ = saved_bytes(shape, tokens=1000, patches=0, width=2, checkpointing=True)
    # norms 8 bytes a value, queries and keys 6 more; queries, keys, values, result; a float32 a head; 4 · 2 · 12288
    layer = 2 * 8 * 4096 + 6 * (4096 + 1024) + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 8 * 12_288
    assert bytes_ == 1000 * (36 * 2 * 4096 + layer + 8 * 4096)
