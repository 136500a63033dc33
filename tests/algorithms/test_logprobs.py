from typing import Any

import pytest
import torch

from opensearch_lightning.algorithms import tiled_logprobs, token_logprobs, token_scores
from opensearch_lightning.errors import ConfigurationError

N, H, V = 13, 6, 29


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles that divide neither the positions nor the vocabulary."""
    monkeypatch.setattr(tiled_logprobs, "_CPU_ROWS", 5)
    monkeypatch.setattr(tiled_logprobs, "_CPU_COLUMNS", 8)


def batch(dtype=torch.float64, scale=1.0) -> Any:
    draw = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(N, H, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=draw)


def reference(hidden, weight, targets, temperature=1.0, forbidden=None):
    logits = hidden.double() @ weight.double().T / temperature
    if forbidden is not None:
        logits = logits.index_fill(-1, forbidden, -1e300)
    distribution = torch.log_softmax(logits, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution[torch.arange(len(targets)), targets], entropy


def mixed(logprobs, entropy):
    """A loss in which every position and both results weigh differently."""
    places = torch.arange(len(logprobs), dtype=logprobs.dtype)
    return (logprobs * (places - 4)).sum() + (entropy * (3 - places).cos()).sum()


def as_matrix(weight):
    return weight


def as_module(weight):
    return lambda hidden: hidden @ weight.T


either_way = pytest.mark.parametrize("form", [as_matrix, as_module])


@either_way
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("forbidden", [None, torch.tensor([0, 7, 8, 28])])
def test_values_and_gradients_equal_a_full_log_softmax(form, chunk_size, temperature, forbidden):
    hidden, weight, targets = batch()
    targets = torch.where(torch.isin(targets, torch.tensor([0, 7, 8, 28])), 3, targets)
    expected = reference(hidden, weight, targets, temperature, forbidden)
    got: Any = token_logprobs(hidden, form(weight), targets, temperature, chunk_size, forbidden_ids=forbidden)
    losses = [lambda x: (x[0] * torch.arange(N)).sum(), lambda x: (x[1] * torch.arange(N)).sum(), lambda x: mixed(*x)]
    torch.testing.assert_close(got, expected)
    for loss in losses:
        torch.testing.assert_close(
            torch.autograd.grad(loss(got), (hidden, weight), retain_graph=True),
            torch.autograd.grad(loss(expected), (hidden, weight), retain_graph=True),
        )


@either_way
@pytest.mark.parametrize("chunk_size", [4, 4096])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_likeliest_token_is_the_argmax_of_what_is_allowed(form, chunk_size, with_entropy):
    hidden, weight, targets = batch()
    logits = hidden @ weight.T
    # what is likeliest somewhere is forbidden, in more than one tile
    forbidden = logits.argmax(-1)[:4].unique()
    assert len(forbidden // 8) > 1
    options: Any = {"forbidden_ids": forbidden, "with_entropy": with_entropy, "chunk_size": chunk_size}
    got: Any = token_scores(hidden, form(weight), targets, with_greedy=True, **options)
    expected = logits.index_fill(-1, forbidden, -1e300).argmax(-1)
    assert torch.equal(got.greedy, expected)
    assert not torch.equal(expected, logits.argmax(-1))
    assert not got.greedy.requires_grad
    plain: Any = token_scores(hidden, form(weight), targets, **options)
    assert plain.greedy is None
    assert torch.equal(plain.logprobs, got.logprobs)
    places = torch.arange(N)
    torch.testing.assert_close(
        torch.autograd.grad((got.logprobs * places).sum(), (hidden, weight)),
        torch.autograd.grad((plain.logprobs * places).sum(), (hidden, weight)),
    )


@either_way
def test_of_equally_likely_tokens_the_first_is_named(form):
    logits = torch.tensor([0.0] * 29).index_fill(0, torch.tensor([6, 7, 20]), 3.0)[None].double()
    for forbidden, first in ((None, 6), (torch.tensor([6]), 7), (torch.tensor([6, 7]), 20)):
        got = token_scores(
            logits, form(torch.eye(29).double()), torch.tensor([20]), with_greedy=True, forbidden_ids=forbidden
        )
        assert got.greedy is not None
        assert got.greedy.tolist() == [first]


def test_the_tiles_that_are_shipped_give_the_same(monkeypatch):
    monkeypatch.undo()
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(700, 8, generator=draw), torch.randn(2100, 8, generator=draw)
    targets = torch.randint(2100, (700,), generator=draw)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    got: Any = token_logprobs(hidden, weight, targets)
    expected = reference(hidden, weight, targets)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(mixed(*got), (hidden, weight)), torch.autograd.grad(mixed(*expected), (hidden, weight))
    )


def test_other_devices_take_larger_tiles():
    settings: Any = {"temperature": 1.0, "dtype": torch.float32, "with_entropy": False, "forbidden": None}
    plan = tiled_logprobs.TilePlan.for_device(torch.device("cuda"), chunk_size=7, **settings)
    assert [(tile.start, tile.stop) for tile in plan.column_tiles(20_000)] == [(0, 16_384), (16_384, 20_000)]
    assert [(rows.start, rows.stop) for rows in plan.row_slices(N)] == [(0, 7), (7, 13)]


@either_way
def test_a_forbidden_target_is_impossible_and_stays_finite(form):
    hidden, weight, targets = batch()
    forbidden = targets[:1]
    logprobs, entropy = token_logprobs(hidden, form(weight), targets, chunk_size=4, forbidden_ids=forbidden)
    others = targets != forbidden
    expected, expected_entropy = reference(hidden, weight, targets, forbidden=forbidden)
    assert (logprobs[~others] < -1e300).all() and logprobs.isfinite().all()
    torch.testing.assert_close(logprobs[others], expected[others])
    torch.testing.assert_close(entropy, expected_entropy)
    gradients = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[1][forbidden] == 0).all()


def test_a_module_serves_as_the_output_layer():
    hidden, weight, targets = batch()
    head = torch.nn.Linear(H, V, bias=False).double()
    head.weight = torch.nn.Parameter(weight.detach())
    torch.testing.assert_close(
        token_logprobs(hidden, head, targets, chunk_size=5), token_logprobs(hidden, weight, targets)
    )


@either_way
def test_the_entropy_can_be_left_out(form):
    hidden, weight, targets = batch()
    for chunk_size in (4, 4096):
        logprobs, entropy = token_logprobs(hidden, form(weight), targets, chunk_size=chunk_size, with_entropy=False)
        assert entropy is None
        expected, _ = reference(hidden, weight, targets)
        torch.testing.assert_close(logprobs, expected)
        torch.testing.assert_close(
            torch.autograd.grad((logprobs * targets).sum(), (hidden, weight)),
            torch.autograd.grad((expected * targets).sum(), (hidden, weight)),
        )


def test_an_entropy_that_is_only_looked_at_leaves_the_gradient_alone():
    hidden, weight, targets = batch()
    logprobs, _ = token_logprobs(hidden, weight, targets)
    alone, _ = token_logprobs(hidden, weight, targets, with_entropy=False)
    torch.testing.assert_close(
        torch.autograd.grad(logprobs.sum(), (hidden, weight)), torch.autograd.grad(alone.sum(), (hidden, weight))
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, targets = batch()
    expected = torch.autograd.grad(mixed(*reference(hidden, weight, targets)), (hidden, weight))[1 - frozen]
    inputs = [hidden, weight]
    inputs[frozen].requires_grad_(False)
    mixed(*token_logprobs(hidden, weight, targets)).backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(inputs[1 - frozen].grad, expected)


def test_without_gradients_nothing_is_kept():
    hidden, weight, targets = batch()
    with torch.no_grad():
        logprobs, _ = token_logprobs(hidden, weight, targets)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, reference(hidden, weight, targets)[0].detach())


def test_half_precision_is_computed_in_float32_and_gets_its_own_type_back():
    hidden, weight, targets = batch(torch.bfloat16)
    got: Any = token_logprobs(hidden, weight, targets)
    assert {values.dtype for values in got} == {torch.float32}
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = reference(*wide, targets)
    torch.testing.assert_close([values.double() for values in got], list(expected), rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(mixed(*got), (hidden, weight))
    exact = torch.autograd.grad(mixed(*expected), wide)
    for gradient, right in zip(gradients, exact, strict=True):
        # once rounded, at the end: what is summed position by position in bfloat16 is off by far more
        torch.testing.assert_close(gradient, right.to(torch.bfloat16), rtol=2**-7, atol=1e-5)


def test_autocast_does_not_take_the_precision_away():
    hidden, weight, targets = batch(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got: Any = token_logprobs(hidden.bfloat16().float(), weight, targets)
        gradients = torch.autograd.grad(mixed(*got), (hidden, weight))
    expected: Any = token_logprobs(hidden.bfloat16().float(), weight, targets)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    right = torch.autograd.grad(mixed(*expected), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True))


def test_autocast_hidden_states_and_whole_weights_go_together():
    hidden, weight, targets = batch(torch.float32)
    layer = torch.nn.Linear(H, H, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(hidden)
        assert half.dtype == torch.bfloat16
        logprobs, _ = token_logprobs(half, weight, targets)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), reference(half, weight, targets)[0], rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert layer.weight.grad.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_logits_are_computed_in_the_type_asked_for():
    hidden, weight, targets = batch(torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets, compute_dtype=torch.float64)
    assert logprobs.dtype == entropy.dtype == torch.float64
    torch.testing.assert_close((logprobs, entropy), reference(hidden, weight, targets), rtol=1e-12, atol=1e-12)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@either_way
def test_a_poisoned_position_stays_out_when_it_is_not_asked_for(form):
    hidden, weight, targets = batch()
    asked = torch.arange(N) % 3 != 0
    expected = torch.autograd.grad(mixed(*reference(hidden[asked], weight, targets[asked])), (hidden, weight))
    poisoned = hidden.detach().masked_fill(~asked[:, None], torch.nan).requires_grad_()
    got: Any = token_logprobs(poisoned[asked], form(weight), targets[asked], chunk_size=4)
    torch.testing.assert_close(torch.autograd.grad(mixed(*got), (poisoned, weight)), expected)


def test_a_poisoned_position_that_is_asked_for_spoils_no_other_value():
    hidden, weight, targets = batch()
    poisoned = hidden.detach().clone()
    poisoned[3] = torch.nan
    got: Any = token_logprobs(poisoned, weight, targets)
    expected = reference(hidden, weight, targets)
    others = torch.arange(N) != 3
    for a, b in zip(got, expected, strict=True):
        assert a[3].isnan()
        torch.testing.assert_close(a[others], b[others].detach())


@either_way
def test_no_more_than_a_chunk_of_the_vocabulary_is_kept_for_the_backward_pass(form):
    hidden, weight, targets = batch()
    kept: list[int] = []

    def pack(tensor):
        if tensor is not weight:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(hidden, form(weight), targets, chunk_size=4)
    assert max(kept) < 4 * V


def test_no_position_at_all_still_reaches_every_parameter():
    hidden, weight, targets = batch()
    for form in (as_matrix, as_module):
        logprobs, entropy = token_logprobs(hidden[:0], form(weight), targets[:0])
        assert logprobs.shape == entropy.shape == (0,)
        gradients = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
        assert all((gradient == 0).all() for gradient in gradients)


def test_a_second_derivative_is_refused():
    hidden, weight, targets = batch()
    logprobs, _ = token_logprobs(hidden, weight, targets)
    with pytest.raises(ConfigurationError, match="create_graph=True asks for more"):
        torch.autograd.grad(logprobs.sum(), hidden, create_graph=True)


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_bad_settings_are_refused_with_the_value(temperature, chunk_size):
    hidden, weight, targets = batch()
    with pytest.raises(ConfigurationError, match=f"temperature={temperature} and chunk_size={chunk_size}"):
        token_logprobs(hidden, weight, targets, temperature, chunk_size)


@pytest.mark.parametrize("wrong", [-100, V])
def test_ids_outside_of_the_vocabulary_are_refused_with_the_value(wrong):
    hidden, weight, targets = batch()
    with pytest.raises(ConfigurationError, match=f"forbidden id {wrong} is not a row of .* of {V} tokens"):
        token_logprobs(hidden, weight, targets, forbidden_ids=torch.tensor([1, wrong]))
    targets[4] = wrong
    with pytest.raises(ConfigurationError, match=f"target {wrong} is not a row of .* of {V} tokens"):
        token_logprobs(hidden, weight, targets)


@either_way
def test_large_logits_do_not_round_away_the_logarithm_of_a_sure_token(form):
    logits = torch.tensor([[97.3, 90.1, 88.8], [-61.0, -52.7, -70.5]])
    targets = torch.tensor([0, 1])
    exact = torch.log_softmax(logits.double() / 0.7, -1).gather(1, targets[:, None]).squeeze(1)
    got, _ = token_logprobs(logits, form(torch.eye(3)), targets, 0.7)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=3e-7)


def test_a_logit_that_grows_from_tile_to_tile_neither_overflows_nor_vanishes():
    logits = torch.linspace(-3000, 3000, V)[None].repeat(2, 1)
    logits[1] = logits[1].flip(0)
    targets = torch.tensor([V - 1, 3])
    got: Any = token_logprobs(logits, torch.eye(V), targets)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(got[0].double(), exact.gather(1, targets[:, None]).squeeze(1))
    torch.testing.assert_close(got[1], torch.zeros(2))
