"""Parameters counted from dimensions against those of transformers' models on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.shape import PARTS, RELEASED, PolicyShape
from tests.models.test_router import moe
from tests.models.tiny import tiny_checkpoint, tiny_policy

# Tensors of the released checkpoints, as their model cards count them ("8.77B", "33.4B", "31.1B params").
PUBLISHED_BILLIONS = {"Qwen3-VL-8B-Instruct": 8.77, "Qwen3-VL-32B-Instruct": 33.4, "Qwen3-VL-30B-A3B-Instruct": 31.1}


def part_of(name: str) -> str:
    """The part that a parameter of a real model belongs to."""
    if ".visual." in name:
        return "projector" if "merger" in name else "vision_tower"
    if "norm" in name:
        return "norms"
    places = {
        "embed_tokens": "embedding",
        "lm_head": "output_layer",
        ".self_attn.": "attention",
        ".mlp.gate.": "router",
        ".mlp.experts.": "experts",
        ".mlp.": "mlp",
    }
    return next(part for place, part in places.items() if place in name)


def counted(model: Any) -> dict[str, int]:
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return counts


def config_of(shape: PolicyShape) -> Any:
    """The configuration of transformers that a shape stands for."""
    text = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": shape.attention_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }
    if shape.experts:
        text |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.moe_intermediate,
        }
    vision = {
        "depth": shape.vision.depth,
        "hidden_size": shape.vision.hidden,
        "intermediate_size": shape.vision.intermediate,
        "num_heads": shape.vision.heads,
        "patch_size": shape.vision.patch,
        "temporal_patch_size": shape.vision.temporal_patch,
        "spatial_merge_size": shape.vision.merge,
        "num_position_embeddings": shape.vision.positions,
        "out_hidden_size": shape.vision.out_hidden,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    kind = Qwen3VLMoeConfig if shape.experts else Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=shape.tied)


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_the_parameters_of_the_real_models(name: str) -> None:
    shape = RELEASED[name]
    config = config_of(shape)
    with torch.device("meta"):
        model = (Qwen3VLMoeForConditionalGeneration if shape.experts else Qwen3VLForConditionalGeneration)(config)
    assert shape.parameters() == counted(model)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.total / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.002)
    assert PolicyShape.of(config) == shape


def test_a_tied_dense_model_is_counted_once() -> None:
    model = tiny_policy()
    shape = PolicyShape.of(model.config)
    assert shape.tied
    assert shape.parameters() == counted(model)
    assert shape.active == shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert PolicyShape.of(tiny_checkpoint()) == shape


def test_a_mixture_with_a_dense_layer() -> None:
    model = moe()
    shape = PolicyShape.of(model.config)
    assert shape.parameters() == counted(model)
    assert shape.routed_layers == 2
    # 2 of 6 experts read a token
    assert shape.total - shape.active == shape.parameters()["experts"] * 4 // 6


def test_active_parameters_of_the_large_mixture() -> None:
    # what its name says: 3B of 30B; the vision tower and both embeddings count
    shape = RELEASED["Qwen3-VL-30B-A3B-Instruct"]
    language = shape.active - sum(shape.parameters()[part] for part in ("vision_tower", "projector"))
    assert language / 1e9 == pytest.approx(3.35, abs=0.02)


def test_a_name_or_the_folder_named_so() -> None:
    assert PolicyShape.named("models/Qwen3-VL-8B-Instruct") is RELEASED["Qwen3-VL-8B-Instruct"]
    with pytest.raises(ConfigurationError, match=r"'models/Qwen3-VL-8B-Instrct'.*did you mean 'Qwen3-VL-8B-Instruct'"):
        PolicyShape.named("models/Qwen3-VL-8B-Instrct")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"there is no .*config\.json; give a folder"),
        ("{", "cannot be read as a model's configuration"),
        (json.dumps({"hidden_size": 8}), "cannot be read as a model's configuration"),
        (json.dumps({"model_type": "gpt2"}), "is of 'gpt2'"),
    ],
)
def test_files_that_describe_no_policy(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=expected):
        PolicyShape.of(tmp_path)
