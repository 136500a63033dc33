import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.export import in_dtype, write_policy
from opensearch_lightning.models import Lora, add_lora, full_weights, has_adapters, merge_adapters, policy_logprobs
from tests.models.test_router import moe
from tests.models.tiny import tiny_policy, tiny_processor
from tests.packed import mixed, packed

pytest.importorskip("peft", reason="the extra lora is not installed")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(policy: Any) -> list[str]:
    return [name for name, parameter in policy.named_parameters() if parameter.requires_grad]


def with_adapters(**options: Any) -> Any:
    """Adapters that do something; a fresh one's second matrix is zero."""
    policy = tiny_policy(lora={"r": 4, "alpha": 6, **options})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def logprobs_of(policy: Any) -> torch.Tensor:
    batch = packed(mixed())
    return policy_logprobs(policy, batch, batch.step_ids >= 0)[0]


def test_only_the_adapters_of_the_language_model_are_trained() -> None:
    plain, policy = tiny_policy(), tiny_policy(lora={"r": 4})
    layers = [f"model.language_model.layers.{n}" for n in range(plain.config.text_config.num_hidden_layers)]
    blocks = {name: "self_attn" if name in LINEARS[:4] else "mlp" for name in LINEARS}
    assert set(trained(policy)) == {
        f"{layer}.{blocks[name]}.{name}.lora_{side}.default.weight"
        for layer in layers
        for name in LINEARS
        for side in "AB"
    }
    assert type(policy) is type(plain)
    assert has_adapters(policy)
    assert not has_adapters(plain)
    assert torch.equal(logprobs_of(policy), logprobs_of(plain)), "a fresh adapter changes nothing"


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_reach_every_adapter_and_nothing_else(gradient_checkpointing: bool) -> None:
    policy = with_adapters()
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logprobs_of(policy.train()).sum().backward()
    moved = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert moved == set(trained(policy))
    assert all(bool(policy.get_parameter(name).grad.any()) for name in moved)


def test_layers_can_be_named() -> None:
    last = tiny_policy(lora={"target_modules": ["v_proj"]})
    assert {name.split(".")[-4] for name in trained(last)} == {"v_proj"}
    pattern = tiny_policy(lora=Lora(target_modules=r"model\.visual\.blocks\.0\.attn\.(qkv|proj)"))
    assert {name.split(".lora_")[0] for name in trained(pattern)} == {
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.attn.proj",
    }


def test_a_mixture_of_experts_has_adapters_on_all_but_experts_and_routers() -> None:
    policy = moe()
    # one layer is dense
    dense = {name for name, module in policy.named_modules() if name.endswith("gate_proj")}
    add_lora(policy, Lora(r=2))
    names = trained(policy)
    assert {name.split(".")[-4] for name in names if ".mlp." not in name} == set(LINEARS[:4])
    assert {name.split(".lora_")[0] for name in names if "gate_proj" in name} == dense
    assert not any("experts" in name or ".gate." in name for name in names)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["lm_head"], r"lm_head \(Linear\) can have no adapter: name linear layers"),
        (["embed_tokens"], r"embed_tokens \(Embedding\) can have no adapter"),
        (["layers"], r"layers \(ModuleList\) can have no adapter"),
        ("q_proj", "target_modules is 'q_proj' and no layer has that name"),
    ],
)
def test_layers_without_adapters_are_named(target: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tiny_policy(lora={"target_modules": target})


@pytest.mark.parametrize("settings", [{"r": 0}, {"alpha": 0}, {"dropout": 1.0}])
def test_settings_that_cannot_be_trained_are_named(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match="set r of 1 or more, alpha above 0, and dropout from 0 to below 1"):
        Lora(**settings)


def test_a_second_set_of_adapters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has adapters already"):
        add_lora(with_adapters(), Lora())


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"adapters need peft: pip install 'opensearch-lightning\[lora\]'"):
        tiny_policy(lora={})


def test_adapters_of_a_half_precision_policy_are_float32() -> None:
    policy = tiny_policy(dtype="bfloat16", lora={"r": 2})
    assert {policy.get_parameter(name).dtype for name in trained(policy)} == {torch.float32}
    assert {weight.dtype for weight in tiny_policy(dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert logprobs_of(policy).isfinite().all()


def test_the_exported_policy_says_what_the_one_with_adapters_says(tmp_path: Path) -> None:
    policy = with_adapters().eval()
    weights = in_dtype(full_weights(policy), torch.float32)
    settings: Any = {"config": policy.config, "processor": tiny_processor()}
    write_policy(weights, tmp_path / "policy", lora_alpha=6, **settings)
    alone = AutoModelForImageTextToText.from_pretrained(tmp_path / "policy", local_files_only=True)
    assert alone.state_dict().keys() == tiny_policy().state_dict().keys()
    torch.testing.assert_close(logprobs_of(alone), logprobs_of(policy), atol=1e-5, rtol=1e-5)
    assert (logprobs_of(alone) - logprobs_of(tiny_policy())).abs().max() > 0.1
    with pytest.raises(ConfigurationError, match="how strong they are is not known: give --lora-alpha"):
        write_policy(weights, tmp_path / "other", **settings)


def test_merging_adds_the_scaled_product() -> None:
    name = "model.layer.q_proj"
    weights = {
        f"{name}.base_layer.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        f"{name}.base_layer.bias": torch.tensor([5.0, 6.0]),
        f"{name}.lora_A.default.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        f"{name}.lora_B.default.weight": torch.tensor([[1.0, 1.0], [0.0, -1.0]]),
        "norm.weight": torch.tensor([7.0]),
    }
    merged = merge_adapters(weights, alpha=6)
    # 6/2 · [[1, 2], [0, -2]]
    assert merged[f"{name}.weight"].tolist() == [[4.0, 8.0], [3.0, -2.0]]
    assert merged[f"{name}.bias"].tolist() == [5.0, 6.0]
    assert merged["norm.weight"].tolist() == [7.0]
    assert len(merged) == 3
