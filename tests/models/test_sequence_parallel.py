"""Packed rows read by several ranks together, against one process: one fork does the work, the tests look at it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import Qwen3VLForConditionalGeneration

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import SequenceParallel, policy_logprobs
from tests.models.tiny import tiny_checkpoint, tiny_policy
from tests.packed import mixed, packed, padded, run
from tests.strategies.cpu_ranks import on_ranks, without_shared_memory

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")

RANKS = 4
CASES = {
    "mixed": mixed(),
    "text": [sample for sample in mixed() if not sample.images],
    # the last rank has filling alone
    "short": [run(0, [2], [3])],
}


def policy(heads: int, kv_heads: int) -> Any:
    """A tiny policy with that many heads, and random weights that are the same in every process."""
    config = tiny_policy().config
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads = heads, kv_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3VLForConditionalGeneration(config)


def scored(model: Any, name: str, parallel: SequenceParallel | None = None) -> dict[str, Any]:
    """Log-probabilities, entropies, and the gradients of a sum in which each token has a weight of its own."""
    batch = packed(CASES[name])
    mask = batch.step_ids >= 0
    logprobs, entropy = policy_logprobs(
        model, batch, mask, with_entropy=True, chunk_size=7, temperature=0.7, sequence_parallel=parallel
    )
    assert entropy is not None
    weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    model.zero_grad()
    (weights * (logprobs + 0.5 * entropy)).sum().backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "gradients": gradients}


def checkpointed(model: Any) -> Any:
    model.train().activation_checkpointing_enable()
    return model


def message(call: Any, *arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call(*arguments)
    return str(caught.value)


def work() -> dict[str, Any]:
    without_shared_memory()
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    four, two = SequenceParallel(4), SequenceParallel(2)
    shared = policy(4, 2)
    done: dict[str, Any] = {name: scored(shared, name, four) for name in CASES}
    done["checkpointed"] = scored(checkpointed(policy(4, 2)), "mixed", four)
    done["pairs"] = scored(policy(2, 1), ("mixed", "text")[rank // 2], two)
    done["groups"] = [layer.self_attn.num_key_value_groups for layer in shared.model.language_model.layers]
    done["gathered"] = two.gather(rank)
    done["sizes"] = message(SequenceParallel, 3)
    done["heads"] = message(four.check_heads, policy(2, 1).config)
    wide = padded(CASES["text"])
    done["padded"] = message(partial(policy_logprobs, shared, wide, wide.step_ids >= 0, sequence_parallel=four))
    return done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tiny_checkpoint()
    folder: Path = tmp_path_factory.mktemp("ulysses")
    return on_ranks(work, folder, ranks=RANKS)


def check(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank has all values; the gradients of all add up."""
    assert (expected["logprobs"] != 0).any()
    for part in parts:
        torch.testing.assert_close(part["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(part["entropy"], expected["entropy"], atol=1e-5, rtol=0)
        assert part["logprobs"].equal(parts[0]["logprobs"])
    for name, gradient in expected["gradients"].items():
        total = sum(part["gradients"][name] for part in parts)
        torch.testing.assert_close(total, gradient, atol=1e-5 * max(1.0, float(gradient.abs().max())), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_are_one(ranks: Any, name: str) -> None:
    assert packed(CASES[name]).input_ids.shape[1] % RANKS, "the row is to be filled up"
    check([rank[name] for rank in ranks], scored(policy(4, 2), name))
    assert all(rank["groups"] == [2] * len(rank["groups"]) for rank in ranks), "a layer was changed"


def test_layers_computed_again_exchange_again(ranks: Any) -> None:
    check([rank["checkpointed"] for rank in ranks], scored(policy(4, 2), "mixed"))


@pytest.mark.parametrize(("first", "name"), [(0, "mixed"), (2, "text")])
def test_each_group_reads_its_own_row(ranks: Any, first: int, name: str) -> None:
    assert [rank["gathered"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    check([rank["pairs"] for rank in ranks[first : first + 2]], scored(policy(2, 1), name))


def test_what_cannot_be_split_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert "size of 3 does not fit 4 rank(s)" in rank["sizes"]
        assert "2 heads and 1 key-value heads, which 4 sequence-parallel ranks" in rank["heads"]
        assert "this batch is padded: lay it out with chat.pack" in rank["padded"]
    assert "size of 2 does not fit 1 rank(s)" in message(SequenceParallel, 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(32, 8, 8, True), (32, 8, 16, True), (32, 8, 3, False), (8, 8, 16, False), (24, 8, 12, False), (6, 3, 2, False)],
)
def test_which_heads_fit(heads: int, kv_heads: int, size: int, fits: bool) -> None:
    parallel = object.__new__(SequenceParallel)
    parallel.size = size
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if fits:
        parallel.check_heads(SimpleNamespace(text_config=text))
    else:
        assert f"{heads} heads" in message(parallel.check_heads, SimpleNamespace(text_config=text))
