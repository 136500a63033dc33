"""Tiny Qwen3-VL checkpoints of random weights, for quickstarts and tests without a download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from opensearch_lightning.chat.tokens import (
    CONTROL_TOKENS,
    END_OF_TEXT,
    IM_END,
    IMAGE_PAD,
    SPECIAL_TOKENS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)
from opensearch_lightning.errors import ConfigurationError

_PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text before byte pairs are merged."""


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Dimensions of a tiny policy. The defaults make about 0.7 million parameters."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    vision_depth: int = 2
    vision_hidden: int = 64
    vision_heads: int = 2
    patch_size: int = 16
    merge_size: int = 2
    max_positions: int = 8192


def build_tiny_checkpoint(
    out_dir: str | Path,
    texts: Iterable[str],
    *,
    vocab_size: int = 2048,
    min_pixels: int = 32 * 32,
    max_pixels: int = 128 * 128,
    initializer_range: float = 0.05,
    seed: int = 0,
    **sizes: int,
) -> Path:
    """Write a Qwen3-VL checkpoint with random weights and a tokenizer of its own.

    The tokenizer is a byte-level BPE trained on ``texts``, with Qwen3's control tokens at the head of the vocabulary;
    every byte is in it, so no text is lost. Processor and model load offline with ``AutoProcessor`` and
    ``AutoModelForImageTextToText``. The same arguments give the same files.

    Args:
        out_dir: folder to make; it must not hold a checkpoint yet.
        texts: what the tokenizer learns its merges from. Put in text like what the policy will write, calls included.
        vocab_size: most tokens of the vocabulary; fewer when the texts are short.
        min_pixels: smaller pictures are enlarged to this many pixels.
        max_pixels: larger pictures are reduced to this many pixels. A token shows 32 × 32 pixels.
        initializer_range: standard deviation of the random weights; 0.05 learns faster here than the usual 0.02.
        seed: of the random weights.
        sizes: fields of :class:`TinySizes`.

    Returns:
        ``out_dir``.

    Raises:
        ConfigurationError: if a size cannot work, or the folder holds a checkpoint.
    """
    out = Path(out_dir)
    if (out / "config.json").exists():
        raise ConfigurationError(f"{out} holds a checkpoint already: remove it, or give another folder")
    dimensions = _checked_sizes(sizes)
    smallest = len(CONTROL_TOKENS) + 256
    if vocab_size < smallest:
        raise ConfigurationError(
            f"vocab_size={vocab_size} is too small for bytes and control tokens: at least {smallest}"
        )
    tokenizer = _train_tokenizer(texts, vocab_size)
    processor = _processor(tokenizer, dimensions, min_pixels=min_pixels, max_pixels=max_pixels)
    config = _config(tokenizer, dimensions, initializer_range)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[config.text_config.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return out


def _checked_sizes(sizes: dict[str, int]) -> TinySizes:
    unknown = sizes.keys() - TinySizes.__dataclass_fields__.keys()
    if unknown:
        raise ConfigurationError(
            f"unknown sizes {sorted(unknown)}: choose from {sorted(TinySizes.__dataclass_fields__)}"
        )
    dimensions = TinySizes(**sizes)
    if dimensions.heads % dimensions.kv_heads:
        raise ConfigurationError(f"heads={dimensions.heads} must be a multiple of kv_heads={dimensions.kv_heads}")
    if dimensions.head_dim % 32:
        raise ConfigurationError(f"head_dim={dimensions.head_dim} must be a multiple of 32, which every engine takes")
    if dimensions.vision_hidden % (4 * dimensions.vision_heads):
        raise ConfigurationError(
            f"vision_hidden={dimensions.vision_hidden} must be a multiple of 4 times vision_heads="
            f"{dimensions.vision_heads}: each head turns by row and by column"
        )
    return dimensions


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_with_flags(tokenizer),
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2**20,
    )


def _with_flags(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer flags every token it is given as special; only the first of them are."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(description))


def _processor(
    tokenizer: PreTrainedTokenizerFast, sizes: TinySizes, *, min_pixels: int, max_pixels: int
) -> Qwen3VLProcessor:
    vision: dict[str, Any] = {
        "patch_size": sizes.patch_size,
        "merge_size": sizes.merge_size,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**vision),
        chat_template=chat_template(),
    )


def chat_template() -> str:
    """Qwen3-VL's chat template, in this package's wording: the same text for the same messages."""
    return files("opensearch_lightning.models").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _config(tokenizer: PreTrainedTokenizerFast, sizes: TinySizes, initializer_range: float) -> Qwen3VLConfig:
    half = sizes.head_dim // 2
    side = half * 5 // 16  # as in the released models: 24 of 64 frequencies turn by time, 20 by row, 20 by column
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": sizes.max_positions,
            "initializer_range": initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [half - 2 * side, side, side],
                "mrope_interleaved": True,
            },
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": sizes.vision_depth,
            "hidden_size": sizes.vision_hidden,
            "intermediate_size": 2 * sizes.vision_hidden,
            "num_heads": sizes.vision_heads,
            "patch_size": sizes.patch_size,
            "spatial_merge_size": sizes.merge_size,
            "temporal_patch_size": 2,
            "out_hidden_size": sizes.hidden_size,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": list(range(max(1, min(3, sizes.vision_depth - 1, sizes.layers)))),
            "initializer_range": initializer_range,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_PAD),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO_PAD),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(VISION_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(VISION_END),
        tie_word_embeddings=True,
    )
