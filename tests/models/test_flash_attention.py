"""Packed rows through the flash-attn kernel, which is stood in for where transformers would import it."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils

from opensearch_lightning.models import policy_logprobs
from opensearch_lightning.models.attention import FLASH
from tests.models.tiny import tiny_policy
from tests.packed import image, packed, padded, run

ALONE = [run(1, [3, image(1), 5], [6], [4]), run(2, [7], [5]), run(3, [5, image(2, 2, 6)], [4, image(3), 2], [6])]
SHARED = [run(1, [3, image(1), 5], [6]), run(2, [3, image(1), 5], [4]), run(3, [7], [5])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call of the kernel."""
    seen: list[dict[str, Any]] = []

    def whole(q: Any, k: Any, v: Any, dropout_p: Any = 0.0, softmax_scale: Any = None, causal: bool = False) -> Any:
        seen.append({"causal": causal, "rows": len(q)})
        states = (part.transpose(1, 2) for part in (q, k, v))
        return scaled_dot_product_attention(*states, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(
            1, 2
        )

    def varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
    ) -> Any:
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k
        seen.append({"causal": causal, "ends": cu_seqlens_q.tolist(), "longest": max_seqlen_q})
        lengths = cu_seqlens_q.diff().tolist()
        stretches = zip(*(part.transpose(0, 1).split(lengths, dim=1) for part in (q, k, v)), strict=True)
        return torch.cat(
            [
                scaled_dot_product_attention(
                    *(part[None] for part in stretch), is_causal=causal, scale=softmax_scale, enable_gqa=True
                )[0].transpose(0, 1)
                for stretch in stretches
            ]
        )

    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "_lazy_imports",
        lambda name, *_, **__: {FLASH: (whole, varlen, None, None, None)}[name],
    )
    return seen


def flash_policy(**options: Any) -> Any:
    policy = tiny_policy(**options)
    policy.config.text_config._attn_implementation = FLASH
    return policy.train()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_segments_are_told_to_the_kernel(calls: Any, gradient_checkpointing: bool) -> None:
    policy, plain = flash_policy(gradient_checkpointing=gradient_checkpointing), tiny_policy().train()
    batch, wide = packed(ALONE), padded(ALONE)
    got, _ = policy_logprobs(policy, batch, batch.step_ids >= 0)
    expected, _ = policy_logprobs(plain, wide, wide.step_ids >= 0)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    lengths = [len(one.token_ids) for one in ALONE]
    ends = [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    layers = policy.config.text_config.num_hidden_layers
    assert calls == [{"causal": True, "ends": ends, "longest": max(lengths)}] * layers

    got.sum().backward()
    expected.sum().backward()
    for (name, one), (_, other) in zip(policy.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)
    assert len(calls) == layers * (1 + gradient_checkpointing)


def test_padded_rows_are_read_as_by_transformers_also_behind_packed_ones(calls: Any) -> None:
    policy, batch, wide = flash_policy(), packed(ALONE), padded(ALONE)
    policy_logprobs(policy, batch, batch.step_ids >= 0)
    calls.clear()
    got, _ = policy_logprobs(policy, wide, wide.step_ids >= 0)
    expected, _ = policy_logprobs(tiny_policy(), wide, wide.step_ids >= 0)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert calls == [{"causal": True, "rows": len(ALONE)}] * policy.config.text_config.num_hidden_layers


def test_a_shared_prompt_is_attended_to_without_the_kernel(calls: Any) -> None:
    policy, batch, wide = flash_policy(), packed(SHARED), padded(SHARED)
    assert any(segment.parent >= 0 for segment in batch.segments)
    got, _ = policy_logprobs(policy, batch, batch.step_ids >= 0)
    expected, _ = policy_logprobs(tiny_policy(), wide, wide.step_ids >= 0)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert calls == []
