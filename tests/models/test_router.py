import copy
from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.router import collect_router_logits, float32_router, router_losses
from tests.models.tiny import tiny_policy

EXPERTS, TOP_K, LAYERS, ROUTED = 6, 2, 3, 2
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "mlp_only_layers": [1],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}


def moe(dtype=torch.float32) -> Any:
    """A tiny mixture of experts; its middle layer is dense."""
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(
        text_config=TEXT,
        vision_config={**VISION, "deepstack_visual_indexes": [0]},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    return Qwen3VLMoeForConditionalGeneration(config).to(dtype).train()


def tokens() -> Any:
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "use_cache": False}


def padded() -> Any:
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 5:] = False
    return valid


def random_logits(rows=18, scale=2.0):
    draw = torch.Generator().manual_seed(2)
    return [(scale * torch.randn(rows, EXPERTS, generator=draw)).requires_grad_() for _ in range(ROUTED)]


def test_the_logits_of_every_router_are_collected_however_the_model_is_called():
    model = moe()
    expected = model(**tokens(), output_router_logits=True).router_logits
    assert len(expected) == ROUTED
    for part in (model, model.model, model.model.language_model):
        with collect_router_logits(model) as logits:
            part(**tokens())
        assert len(logits) == ROUTED
        for got, right in zip(logits, expected, strict=True):
            assert got.shape == (18, EXPERTS)
            torch.testing.assert_close(got, right, rtol=0, atol=0)
    model(**tokens())
    assert len(logits) == ROUTED


def packed() -> Any:
    """Two documents in one row: text positions start again, as do those of each axis."""
    positions = torch.cat([torch.arange(5), torch.arange(4)]).expand(4, 1, 9)
    return {"input_ids": tokens()["input_ids"][:1], "position_ids": positions, "use_cache": False}


def test_documents_of_a_packed_row_are_routed_as_if_alone():
    model = moe()
    ids = packed()["input_ids"]
    with collect_router_logits(model) as together:
        model.model(**packed())
    alone = []
    for part in (ids[:, :5], ids[:, 5:]):
        with collect_router_logits(model) as logits:
            model.model(input_ids=part, use_cache=False)
        alone.append(logits)
    for whole, first, second in zip(together, *alone, strict=True):
        torch.testing.assert_close(whole, torch.cat([first, second]), rtol=1e-4, atol=1e-5)


def losses_and_gradients(model, *, inside):
    """Gradients of a loss on the router logits and the output, with the backward pass in the context or after it."""
    model.zero_grad()

    def backward(hidden, logits):
        losses = router_losses(logits, EXPERTS, TOP_K, padded())
        (hidden.square().sum() + losses.load_balancing_sum + losses.z_sum).backward()

    with collect_router_logits(model) as logits:
        hidden = model.model(**tokens()).last_hidden_state
        if inside:
            backward(hidden, logits)
    assert len(logits) == ROUTED
    if not inside:
        backward(hidden, logits)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("inside", [True, False])
def test_gradient_checkpointing_changes_nothing(inside):
    model = moe()
    expected = losses_and_gradients(model, inside=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = losses_and_gradients(model, inside=inside)
    torch.testing.assert_close(got, expected)
    assert any(name.endswith("gate.weight") and (gradient != 0).any() for name, gradient in got.items())


def test_checkpointing_that_would_lose_the_gradient_is_refused():
    model = moe()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ConfigurationError, match="no gradient.*use_reentrant"), collect_router_logits(model):
        model.model(**tokens())
    with torch.no_grad(), collect_router_logits(model) as logits:
        model.model(**tokens())
    assert len(logits) == ROUTED


def test_a_second_pass_and_a_dense_model_are_refused():
    model = moe()
    with collect_router_logits(model):
        model(**tokens())
        with pytest.raises(ConfigurationError, match="ran twice"):
            model(**tokens())
    for use in (float32_router, lambda dense: collect_router_logits(dense).__enter__()):
        with pytest.raises(ConfigurationError, match="Qwen3VLForConditionalGeneration has no router"):
            use(tiny_policy())


@pytest.mark.parametrize("valid", [torch.ones(2, 9, dtype=torch.bool), padded()])
def test_the_load_balancing_loss_is_that_of_transformers(valid):
    logits = random_logits()
    losses = router_losses(logits, EXPERTS, TOP_K, valid)
    assert losses.tokens == valid.sum()
    expected: Any = load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K, valid)
    got = losses.load_balancing_sum / losses.tokens
    torch.testing.assert_close(got, expected)
    assert abs(expected.item() - TOP_K) > 0.01
    torch.testing.assert_close(torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits))


def test_values_worked_by_hand():
    # both tokens choose expert 0, which has 3/4 of the probability: 2 · (1 · 3/4 + 0 · 1/4); logsumexp is ln 4
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    losses = router_losses([logits], 2, 1, torch.tensor([True, True]))
    torch.testing.assert_close(losses.load_balancing_sum, torch.tensor(2 * 1.5))
    torch.testing.assert_close(losses.z_sum, 2 * torch.tensor(4.0).log().square())
    # each token its own expert: as balanced as can be
    even = router_losses([torch.eye(4), 3 * torch.eye(4).flip(0)], 4, 1, torch.ones(4))
    torch.testing.assert_close(even.load_balancing_sum / even.tokens, torch.tensor(1.0))


def test_micro_batches_add_up():
    logits, valid = random_logits(), padded()
    whole = router_losses(logits, EXPERTS, TOP_K, valid)
    parts = [
        router_losses([layer[rows] for layer in logits], EXPERTS, TOP_K, valid.reshape(-1)[rows])
        for rows in (slice(0, 7), slice(7, 18))
    ]
    assert sum(part.tokens for part in parts) == whole.tokens
    z: Any = sum(part.z_sum for part in parts)
    torch.testing.assert_close(z, whole.z_sum)
    torch.testing.assert_close(torch.autograd.grad(z, logits), torch.autograd.grad(whole.z_sum, logits))
    expected = torch.stack([layer.reshape(2, 9, EXPERTS)[valid].logsumexp(-1) ** 2 for layer in logits]).mean()
    torch.testing.assert_close(whole.z_sum / whole.tokens, expected)


def test_padding_is_no_token_whatever_stands_there():
    logits, valid = random_logits(), padded()
    poisoned = [layer.detach().masked_fill(~valid.reshape(-1, 1), torch.nan).requires_grad_() for layer in logits]
    got, expected = (router_losses(layers, EXPERTS, TOP_K, valid) for layers in (poisoned, logits))
    assert torch.equal(got.load_balancing_sum, expected.load_balancing_sum)
    assert torch.equal(got.z_sum, expected.z_sum)
    for layer in torch.autograd.grad(got.load_balancing_sum + got.z_sum, poisoned):
        assert (layer[~valid.reshape(-1)] == 0).all()


def test_nothing_but_padding_costs_nothing():
    logits = random_logits()
    losses = router_losses(logits, EXPERTS, TOP_K, torch.zeros(2, 9))
    assert losses.load_balancing_sum == losses.z_sum == losses.tokens == 0
    gradients = torch.autograd.grad(losses.load_balancing_sum + losses.z_sum, logits)
    assert all((gradient == 0).all() for gradient in gradients)


def test_logits_of_another_pass_are_refused():
    with pytest.raises(ConfigurationError, match=r"shape \(18, 6\), but 17 tokens and 6 experts"):
        router_losses(random_logits(), EXPERTS, TOP_K, torch.ones(17))
    with pytest.raises(ConfigurationError, match="no router logits"):
        router_losses([], EXPERTS, TOP_K, torch.ones(17))


def inputs_and_outputs(model, autocast=False):
    """What one router of the model was given and gave in a pass."""
    router, passed = model.model.language_model.layers[0].mlp.gate, []
    handle = router.register_forward_hook(lambda _router, inputs, outputs: passed.append((inputs[0], outputs)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**tokens())
    handle.remove()
    return router.weight, *passed[0]


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_float32_router_computes_in_float32(dtype, autocast):
    model = moe(dtype)
    names = list(model.state_dict())
    _, _, (coarse, *_) = inputs_and_outputs(model, autocast)
    assert coarse.dtype == torch.bfloat16
    float32_router(model)
    float32_router(model)
    weight, hidden, (logits, float32_scores, indices) = inputs_and_outputs(model, autocast)
    assert weight.dtype == dtype
    assert logits.dtype == torch.float32
    exact = hidden.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    assert (coarse.double() - exact).abs().max() > 100 * (logits.double() - exact).abs().max()
    top, chosen = exact.softmax(-1).topk(TOP_K)
    assert torch.equal(indices, chosen)
    assert float32_scores.dtype == hidden.dtype
    torch.testing.assert_close(
        float32_scores.double(), top / top.sum(-1, keepdim=True), rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    assert list(model.state_dict()) == names


def test_a_float32_router_is_still_trained_saved_and_copied(tmp_path):
    plain, model = moe(), moe()
    float32_router(model)
    copied = copy.deepcopy(model)
    outputs = [one(**tokens()).logits for one in (plain, model, copied)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    outputs[2].sum().backward()
    gates = [parameter.grad for name, parameter in copied.named_parameters() if name.endswith("gate.weight")]
    assert len(gates) == ROUTED
    assert all((gradient != 0).any() for gradient in gates)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    again = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path).train()
    torch.testing.assert_close(again(**tokens()).logits, outputs[0])
