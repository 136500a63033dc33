"""Counted memory against real tensors, and against DeepSpeed's rules by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from opensearch_lightning.models.shape import PolicyShape
from opensearch_lightning.modules import AgenticSFT
from opensearch_lightning.planning import Figures, Memory, Setup, count_memory
from opensearch_lightning.planning.setup import Zero
from tests.data.trainers import trainer
from tests.models.tiny import tiny_policy
from tests.modules.test_sft import SAMPLES, Batches, batch_of
from tests.planning.setups import setup_of

SFT = setup_of("experiment=sft_8b")
P = 8_767_123_696
"""Parameters of Qwen3-VL-8B-Instruct."""


def items(memory: Memory) -> dict[str, float]:
    return {item.name: item.bytes for item in memory.gpu}


class Look(Callback):
    """Notes how large the gradients are behind an update; a fit that ends clears them."""

    gradients = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.gradients = nbytes([p.grad for p in module.parameters() if p.grad is not None])


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train_vision", [True, False])
def test_state_of_one_process_is_that_of_a_real_training_step(dtype: str, train_vision: bool) -> None:
    policy = tiny_policy(dtype=dtype, train_vision=train_vision)
    shape = PolicyShape.of(policy.config)
    module = AgenticSFT(policy, schedule="constant", warmup_ratio=0.0)
    look = Look()
    run = trainer(1, look)
    run.fit(module, datamodule=Batches([batch_of(SAMPLES)]))
    states = run.optimizers[0].state.values()
    moments = [value for state in states for value in state.values() if value.ndim]
    trained = shape.parameters() | ({} if train_vision else dict.fromkeys(("vision_tower", "projector"), 0))
    setup = Setup(
        name="tiny",
        kind="sft",
        model="tiny",
        shape=shape,
        trained=trained,
        width=getattr(torch, dtype).itemsize,
        compute_width=4,
        checkpointing=False,
        zero=Zero(),
        nodes=1,
        ranks_per_node=1,
        max_length=512,
    )
    counted = items(count_memory(setup, Figures()))
    assert counted["weights"] == nbytes(list(policy.parameters()))
    assert counted["gradients"] == look.gradients
    # counters of updates, 4 bytes a parameter, are left out
    assert counted["optimizer moments"] == nbytes(moments)


def test_zero3_shares_all_but_what_a_pass_needs() -> None:
    counted = items(count_memory(SFT, Figures()))
    assert counted["weights"] == 2 * P / 256
    assert counted["float32 weights of the optimizer"] == 4 * P / 256
    assert counted["optimizer moments"] == 8 * P / 256
    assert counted["gradients, shared"] == 2 * P / 256
    assert counted["gathered weights"] == 2 * 10**9
    assert counted["reduction buckets"] == 2 * 5 * 10**8
    # the output layer's is larger than a bucket, and so is the copy that ranks exchange
    assert counted["gradients on their way"] == 2 * 2 * 151_936 * 4096
    assert "gradients of an update, whole" not in counted


def test_several_passes_add_their_gradients_up_whole() -> None:
    several = dataclasses.replace(SFT, rows_per_rank=2, rows_per_pass=1)
    counted = items(count_memory(several, Figures()))
    assert counted["gradients of an update, whole"] == 2 * P
    assert "gradients on their way" not in counted
    rl = setup_of("experiment=grpo_8b")
    assert items(count_memory(rl, Figures()))["gradients of an update, whole"] == 2 * P


def test_a_bucket_is_copied_where_no_gradient_is_larger() -> None:
    mixture = items(count_memory(setup_of("experiment=sft_30b_a3b"), Figures()))
    # the first matrices of a layer's experts, 128 of them in one tensor, and half a billion elements of a bucket
    assert mixture["gradients on their way"] == 2 * (128 * 2 * 2048 * 768 + 5 * 10**8)


def test_zero2_keeps_whole_weights() -> None:
    setup = setup_of("experiment=sft_8b", "trainer=deepspeed_zero2", "trainer.num_nodes=32", "trainer.max_steps=1")
    counted = items(count_memory(setup, Figures()))
    assert counted["weights"] == 2 * P
    assert counted["optimizer moments"] == 8 * P / 256
    # two of them, as reducing overlaps with computing
    assert counted["reduction buckets"] == 2 * 2 * 5 * 10**8


def test_offloading_moves_state_to_the_node() -> None:
    setup = setup_of("experiment=sft_8b", "trainer=deepspeed_offload", "trainer.num_nodes=1", "trainer.max_steps=1")
    memory = count_memory(setup, Figures())
    assert items(memory).keys().isdisjoint({"weights", "optimizer moments", "gradients, shared"})
    assert items(memory)["gradients on their way"] == items(count_memory(SFT, Figures()))["gradients on their way"]
    node = {item.name: item.bytes for item in memory.node}
    assert node["optimizer state"] == pytest.approx((12 + 2 + 4) * P)
    assert node["weights"] == pytest.approx(2 * P)
    # a start needs a policy a rank, which is less here
    assert memory.node_peak == pytest.approx(20 * P)
    assert node["loading, a policy a rank"] == 8 * 2 * P


def test_frozen_parts_and_adapters_take_no_optimizer() -> None:
    shape = SFT.shape.parameters()
    frozen_vision = ["model.policy.train_vision=false", "model.policy.train_projector=null"]
    several_passes = ["data.batch_size=2", "module.micro_batch=1"]
    frozen = count_memory(setup_of("experiment=sft_8b", *frozen_vision, *several_passes), Figures())
    trained = P - shape["vision_tower"] - shape["projector"]
    assert items(frozen)["gradients of an update, whole"] == 2 * trained
    lora = setup_of("experiment=sft_8b", "model.policy.lora={r: 16}")
    # r · (inputs + outputs) of q, k, v, o, gate, up, down in 36 layers
    widths = 2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 12_288)
    assert lora.adapters == lora.trained_total == 36 * 16 * widths
    counted = items(count_memory(lora, Figures()))
    assert counted["gradients on their way"] == 2 * lora.adapters
    assert counted["weights"] == 2 * (P + lora.adapters) / 256


def test_adapters_are_float32_without_deepspeed() -> None:
    setup = setup_of("experiment=sft_8b", "model.policy.lora={r: 16}", "trainer=cpu")
    counted = items(count_memory(setup, Figures()))
    assert counted["weights"] == 2 * P + 4 * setup.adapters
    assert counted["gradients"] == 4 * setup.adapters
    assert counted["optimizer moments"] == 8 * setup.adapters


def test_the_peak_is_that_of_a_pass_or_of_a_step() -> None:
    memory = count_memory(SFT, Figures(), reserve=1e9)
    by_time = {"always": 0.0, "pass": 0.0, "update": 0.0}
    for item in memory.gpu:
        by_time[item.when] += item.bytes
    assert memory.peak == by_time["always"] + by_time["pass"] + 1e9
    few = dataclasses.replace(SFT, nodes=1, ranks_per_node=1, max_length=64)
    memory = count_memory(few, Figures(), reserve=0)
    update = 8 * P
    # state of 16 bytes a weight and buckets; the optimizer's step is more than so short a pass
    assert memory.peak == 16 * P + 10**9 + update


def test_ranks_that_read_a_row_together_hold_their_stretch() -> None:
    def activations(setup: Setup) -> float:
        return sum(
            value for name, value in items(count_memory(setup, Figures(images_per_row=0))).items() if "act" in name
        )

    whole = setup_of("experiment=grpo_8b")
    assert whole.pass_tokens == 8192 + 70_000
    split = setup_of("experiment=grpo_8b", "module.sequence_parallel_size=4")
    assert split.pass_tokens == (8192 + 70_000) / 4
    assert activations(split) == pytest.approx(activations(whole) / 4, rel=1e-4)


def test_sampling_in_the_training_process_takes_its_cache() -> None:
    setup = setup_of("experiment=grpo_8b", "rollout=transformers", "rollout.engine.own_weights=true")
    counted = items(count_memory(setup, Figures()))
    assert counted["cache of rollouts"] == 64 * 4096 * 2 * 36 * 8 * 128 * 2
    assert counted["weights to sample from"] == 2 * P
