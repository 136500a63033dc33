from typing import Any

import pytest
import torch
from torch import nn

from opensearch_lightning.models.output_layer import output_layer_scores
from tests.models.tiny import tiny_policy

N, H, V = 7, 6, 11


def setup(dtype=torch.float32) -> Any:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(H, V, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(V, H, generator=draw))
    return layer, torch.randn(N, H, generator=draw).to(dtype), torch.randint(1, V, (N,), generator=draw)


def was_called(layer, monkeypatch) -> list[torch.Size]:
    """Shapes that pass through the layer's own forward function."""
    calls = []
    forward = type(layer).forward

    def watched(self, hidden):
        calls.append(hidden.shape)
        return forward(self, hidden)

    monkeypatch.setattr(type(layer), "forward", watched)
    return calls


def expected(layer, hidden, targets, forbidden=()):
    logits = layer(hidden).double().index_fill(-1, torch.tensor(forbidden, dtype=torch.long), -1e300)
    return torch.log_softmax(logits, -1)[torch.arange(N), targets]


def test_a_plain_layer_is_its_matrix(monkeypatch):
    layer, hidden, targets = setup()
    right = expected(layer, hidden, targets, [0])
    calls = was_called(layer, monkeypatch)
    scores = output_layer_scores(layer, hidden, targets, forbidden_ids=torch.tensor([0]))
    assert calls == []
    assert scores.entropy is None
    assert scores.greedy is None
    torch.testing.assert_close(scores.logprobs.double(), right)


class Adapted(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2 + 1


def with_bias():
    layer = nn.Linear(H, V)
    nn.init.normal_(layer.bias)
    return layer


def adapted():
    return Adapted(H, V, bias=False)


def watched_after():
    layer = setup()[0]
    layer.register_forward_hook(lambda *_: None)
    return layer


def watched_before():
    layer = setup()[0]
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def sharded():
    layer = setup()[0]
    layer.weight.ds_id = 3
    return layer


def flattened():
    layer = setup()[0]
    whole = layer.weight.detach().clone()
    layer.weight.data = torch.empty(0)
    layer.forward = lambda hidden: nn.functional.linear(hidden, whole)
    return layer


@pytest.mark.parametrize("make", [with_bias, adapted, watched_after, watched_before, sharded, flattened])
def test_any_other_layer_is_called(make):
    layer, (_, hidden, targets) = make(), setup()
    right = expected(layer, hidden, targets, [0])
    called = []
    forward = layer.forward
    layer.forward = lambda hidden: called.append(len(hidden)) or forward(hidden)
    options = {"chunk_size": 4, "forbidden_ids": torch.tensor([0]), "with_greedy": True}
    got = output_layer_scores(layer, hidden, targets, **options)
    assert called == [4, 3]
    torch.testing.assert_close(got.logprobs.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.greedy, forward(hidden)[:, 1:].argmax(-1) + 1)


@pytest.mark.parametrize("head_dtype", ["float32", "float64"])
def test_a_layer_of_another_type_needs_no_second_matrix(head_dtype, monkeypatch):
    layer = tiny_policy(dtype="bfloat16", head_dtype=head_dtype).lm_head
    hidden = torch.randn(N, layer.in_features, dtype=torch.bfloat16)
    targets = torch.arange(N)
    right = expected(layer, hidden, targets)
    calls = was_called(layer, monkeypatch)
    got = output_layer_scores(layer, hidden, targets).logprobs
    assert calls == []
    assert got.dtype == getattr(torch, head_dtype)
    torch.testing.assert_close(got.double(), right, rtol=1e-6, atol=1e-6)
