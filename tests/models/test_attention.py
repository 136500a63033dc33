"""Attention by segment against one dense mask that says the same."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from opensearch_lightning.chat import Segment
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.attention import SEGMENTED_SDPA, attend_by_segment, segmented_attention
from tests.models.tiny import tiny_policy

SEGMENTS = (
    Segment(start=0, length=5),
    Segment(start=5, length=3, parent=0),
    Segment(start=8, length=7),
    Segment(start=15, length=1, parent=0),
    Segment(start=16, length=9, parent=0),
    Segment(start=25, length=1),
)


def states(heads, seed=0, n=26):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, n, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()


def dense_mask():
    mask = torch.zeros(26, 26, dtype=torch.bool)
    for segment in SEGMENTS:
        own = slice(segment.start, segment.start + segment.length)
        mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.parent >= 0:
            parent = SEGMENTS[segment.parent]
            mask[own, parent.start : parent.start + parent.length] = True
    return mask


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_values_and_gradients_are_those_of_a_dense_mask(kv_heads, scaling):
    module = tiny_policy().model.language_model.layers[0].self_attn
    query, key, value = states(4), states(kv_heads, 1), states(kv_heads, 2)
    weight = torch.randn(1, 26, 4, 8, dtype=torch.float64)
    got, nothing = segmented_attention(module, query, key, value, None, segments=SEGMENTS, scaling=scaling)
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(), scale=scaling, enable_gqa=True
    ).transpose(1, 2)
    assert nothing is None
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    got_gradients = torch.autograd.grad((got * weight).sum(), (query, key, value))
    expected_gradients = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    torch.testing.assert_close(got_gradients, expected_gradients, atol=1e-12, rtol=0)


def test_what_is_not_seen_is_not_even_multiplied_by_zero():
    module = tiny_policy().model.language_model.layers[0].self_attn
    query, key, value = (states(2, seed).detach() for seed in range(3))
    clean, _ = segmented_attention(module, query, key, value, None, segments=SEGMENTS)
    for spoiled in (query, key, value):
        spoiled[:, :, 5:8] = torch.nan
    got, _ = segmented_attention(module, query, key, value, None, segments=SEGMENTS)
    assert got[:, 5:8].isnan().all()
    assert got[:, :5].equal(clean[:, :5])
    assert got[:, 8:].equal(clean[:, 8:])


def test_only_the_text_layers_are_switched_and_they_go_on_as_before():
    model = tiny_policy()
    before = copy.deepcopy(model)
    attend_by_segment(model)
    attend_by_segment(model)
    assert model.config.text_config._attn_implementation == SEGMENTED_SDPA
    assert model.model.language_model.config._attn_implementation == SEGMENTED_SDPA
    assert model.config._attn_implementation == "sdpa"
    assert model.model.visual.config._attn_implementation == "sdpa"
    ids = torch.randint(300, 400, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            assert model(ids, **options).logits.equal(before(ids, **options).logits)
            assert model.generate(ids, max_new_tokens=4, do_sample=False, **options).equal(
                before.generate(ids, max_new_tokens=4, do_sample=False, **options)
            )


def test_another_attention_is_refused():
    model = tiny_policy(attn_implementation="eager")
    with pytest.raises(ConfigurationError, match='eager.*attn_implementation="sdpa"'):
        attend_by_segment(model)
