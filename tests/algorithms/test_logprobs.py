from typing import Any

import pytest
import torch

from opensearch_lightning.algorithms import token_logprobs
from opensearch_lightning.errors import ConfigurationError

N, H, V = 13, 6, 29


def batch(dtype=torch.float64) -> Any:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=draw, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=draw)


def reference(hidden, weight, targets, temperature):
    distribution = torch.log_softmax(hidden @ weight.T / temperature, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution[torch.arange(len(targets)), targets], entropy


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_a_full_log_softmax(chunk_size, temperature):
    hidden, weight, targets = batch()
    expected = reference(hidden, weight, targets, temperature)
    got: Any = token_logprobs(hidden, weight, targets, temperature, chunk_size)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(
            torch.autograd.grad((a * torch.arange(N)).sum(), (hidden, weight), retain_graph=True),
            torch.autograd.grad((b * torch.arange(N)).sum(), (hidden, weight), retain_graph=True),
        )


def test_a_module_serves_as_the_output_layer():
    hidden, weight, targets = batch()
    head = torch.nn.Linear(H, V, bias=False).double()
    head.weight = torch.nn.Parameter(weight.detach())
    torch.testing.assert_close(
        token_logprobs(hidden, head, targets, chunk_size=5), token_logprobs(hidden, weight, targets)
    )


def test_the_entropy_can_be_left_out():
    hidden, weight, targets = batch()
    for chunk_size in (4, 4096):
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_size=chunk_size, with_entropy=False)
        assert entropy is None
        torch.testing.assert_close(logprobs, reference(hidden, weight, targets, 1.0)[0])


def test_half_precision_is_summed_in_float32():
    hidden, weight, targets = batch(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    logits = (hidden @ weight.T).float()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[torch.arange(N), targets])
    assert logprobs.dtype == torch.float32
    assert entropy is not None
    assert entropy.dtype == torch.float32


def test_no_more_than_a_chunk_of_the_vocabulary_is_kept_for_the_backward_pass():
    hidden, weight, targets = batch()
    kept: list[int] = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk_size=4)
    assert max(kept) < 4 * V


def test_no_position_at_all_still_reaches_every_parameter():
    hidden, weight, targets = batch()
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0])
    assert logprobs.shape == (0,)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_bad_settings_are_refused_with_the_value(temperature, chunk_size):
    hidden, weight, targets = batch()
    with pytest.raises(ConfigurationError, match=f"temperature={temperature} and chunk_size={chunk_size}"):
        token_logprobs(hidden, weight, targets, temperature, chunk_size)


def test_large_logits_do_not_round_away_the_logarithm_of_a_sure_token():
    logits = torch.tensor([[97.3, 90.1, 88.8], [-61.0, -52.7, -70.5]])
    targets = torch.tensor([0, 1])
    exact = torch.log_softmax(logits.double() / 0.7, -1).gather(1, targets[:, None]).squeeze(1)
    got, _ = token_logprobs(logits, torch.eye(3), targets, 0.7)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=3e-7)
