import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from opensearch_lightning.chat.tokens import ADDED_TOKENS, CONTROL_TOKENS, SPECIAL_TOKENS
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import build_tiny_checkpoint
from tests.models.tiny import TEXTS, tiny_checkpoint, tiny_policy, tiny_processor

SMALL = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32, "vision_depth": 1}


def fingerprints(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_it_loads_offline_by_the_auto_classes():
    assert isinstance(AutoProcessor.from_pretrained(tiny_checkpoint(), local_files_only=True), Qwen3VLProcessor)
    model = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint(), local_files_only=True)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_the_same_arguments_give_the_same_files(tmp_path):
    first, again, other = (
        fingerprints(build_tiny_checkpoint(tmp_path / name, TEXTS, seed=seed, **SMALL))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def test_building_leaves_the_callers_randomness_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_tiny_checkpoint(tmp_path / "a", TEXTS, **SMALL)
    assert torch.rand(1) == expected


def test_control_tokens_stand_first_with_the_flags_of_qwen3():
    tokenizer = tiny_processor().tokenizer
    assert tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS)) == list(range(26))
    flags = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    assert flags == {name: name in SPECIAL_TOKENS for name in CONTROL_TOKENS}
    assert len(SPECIAL_TOKENS) == 14
    assert ADDED_TOKENS[-2:] == ("<think>", "</think>")
    for name in CONTROL_TOKENS:
        assert len(tokenizer.encode(name)) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_no_text_is_lost(text):
    tokenizer = tiny_processor().tokenizer
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text)) == normal


def test_text_that_was_trained_on_is_short():
    tokenizer = tiny_processor().tokenizer
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 3
    assert len(tokenizer) <= 512


def test_the_configuration_names_the_tokens():
    config, tokenizer = tiny_policy().config, tiny_processor().tokenizer
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    ids = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert tokenizer.convert_tokens_to_ids(names) == ids
    assert config.text_config.vocab_size == len(tokenizer)
    assert config.text_config.pad_token_id == tokenizer.pad_token_id
    generation = tiny_policy().generation_config
    assert generation.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_every_frequency_turns_by_one_axis(tmp_path, head_dim):
    build_tiny_checkpoint(tmp_path / "a", TEXTS, head_dim=head_dim, **SMALL)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    sections = config["text_config"]["rope_parameters"]["mrope_section"]
    assert sum(sections) == head_dim // 2
    if head_dim == 128:
        assert sections == [24, 20, 20]


def test_pixel_limits_bound_the_tokens_of_an_image(tmp_path):
    build_tiny_checkpoint(tmp_path / "a", TEXTS, min_pixels=2 * 32**2, max_pixels=4 * 32**2, **SMALL)
    processor = AutoProcessor.from_pretrained(tmp_path / "a", local_files_only=True)
    for size, tokens in [((8, 8), 4), ((500, 500), 4), ((32, 64), 2)]:
        grid = processor.image_processor(images=[Image.new("RGB", size)])["image_grid_thw"][0]
        assert int(grid.prod()) // 4 == tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100}, "vocab_size=100 is too small.*282"),
        ({"heads": 3, "kv_heads": 2}, "heads=3.*kv_heads=2"),
        ({"head_dim": 24}, "head_dim=24"),
        ({"vision_hidden": 60}, "vision_hidden=60"),
        ({"depth": 2}, r"unknown sizes \['depth'\].*vision_depth"),
    ],
)
def test_sizes_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_tiny_checkpoint(tmp_path / "a", TEXTS, **options)


def test_a_checkpoint_is_not_overwritten():
    with pytest.raises(ConfigurationError, match="holds a checkpoint already"):
        build_tiny_checkpoint(tiny_checkpoint(), TEXTS)
