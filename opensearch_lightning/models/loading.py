"""Loading policies and processors from a folder, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.adapters import Lora, add_lora
from opensearch_lightning.models.output_layer import OutputLayer
from opensearch_lightning.models.patch_embedding import project_by_matrix
from opensearch_lightning.models.router import float32_router as make_routers_float32

HEAD_DTYPES = ("float32", "float64")


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    train_vision: bool = True,
    train_projector: bool | None = None,
    train_language: bool = True,
    lora: Lora | Mapping[str, Any] | None = None,
    head_dtype: str | None = None,
    gradient_checkpointing: bool = False,
    float32_router: bool = False,
) -> Any:
    """Load a Qwen3-VL checkpoint as a policy to train.

    Args:
        path: folder of the checkpoint.
        dtype: of the weights, by torch's name.
        attn_implementation: attention of transformers (``"sdpa"``, ``"flash_attention_2"``, ``"eager"``).
        train_vision: whether the vision tower is trained; otherwise it is frozen.
        train_projector: whether the projector is: the merger behind the tower, and those of its deepstack levels;
            ``None``: as the tower.
        train_language: whether the language model is, with embedding and output layer.
        lora: settings of adapters, which are trained in place of the policy's own weights (extra "lora").
        head_dtype: type in which the output layer computes, ``"float32"`` or ``"float64"``; ``None`` for the type of
            its weights, which stay as they are. Engine and trainer batch differently and so round differently; one
            precision more in this layer brings their log-probabilities closer (as in MiniMax-M1, arXiv 2506.13585).
            The matrix is converted at each call, so a large vocabulary needs room for a second one.
        gradient_checkpointing: keep only the inputs of each layer for the backward pass and compute the rest again:
            about a third more time for a fraction of the memory.
        float32_router: routers of a mixture of experts compute in float32, whatever the type of the weights (Table 5).

    Raises:
        ConfigurationError: if there is no checkpoint at ``path``, nothing is left to train, the output layer cannot
            compute in that type, the model has no router, or adapters cannot be added.
    """
    if head_dtype not in (None, *HEAD_DTYPES):
        raise ConfigurationError(f"head_dtype is {head_dtype!r}; set one of {', '.join(HEAD_DTYPES)}, or null")
    folder = _checkpoint(path)
    policy = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    project_by_matrix(policy)
    _freeze(policy, vision=train_vision, projector=train_projector, language=train_language)
    if lora is not None:
        add_lora(policy, lora if isinstance(lora, Lora) else Lora(**lora))
    if head_dtype is not None:
        policy.lm_head = OutputLayer(policy.lm_head, getattr(torch, head_dtype))
    if float32_router:
        make_routers_float32(policy)
    if gradient_checkpointing:
        # the reentrant kind needs inputs that require gradients, which a frozen vision tower's are not
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def _freeze(policy: Any, *, vision: bool, projector: bool | None, language: bool) -> None:
    projector = vision if projector is None else projector
    if not (vision or projector or language):
        raise ConfigurationError(
            "train_vision, train_projector and train_language are all false, and nothing is left to train: set one"
        )
    visual = policy.model.visual
    policy.requires_grad_(language)
    visual.requires_grad_(vision)
    for part in (visual.merger, visual.deepstack_merger_list):
        part.requires_grad_(projector)


def load_processor(path: str | Path, *, max_pixels: int | None = None, video_max_pixels: int | None = None) -> Any:
    """Load the processor (tokenizer, image processor, chat template) of a checkpoint.

    Its limits are saved with it, so that an exported policy reads pictures as it did in training.

    Args:
        path: folder of the checkpoint.
        max_pixels: most pixels of an image; larger ones are scaled down. Table 4 has 262,144, which is 256 tokens.
            ``None`` for the checkpoint's own limit.
        video_max_pixels: likewise of a video, all its frames together, as transformers counts. Table 4 has 16,384.

    Raises:
        ConfigurationError: if there is no checkpoint at ``path``, or a limit is below the pixels of one token.
    """
    processor = AutoProcessor.from_pretrained(_checkpoint(path), local_files_only=True)
    if max_pixels is not None:
        _limit("max_pixels", processor.image_processor, max_pixels)
    if video_max_pixels is not None:
        _limit("video_max_pixels", processor.video_processor, video_max_pixels)
    return processor


def _limit(name: str, reader: Any, most: int) -> None:
    # the edges in the processor's size are pixel counts, whatever they are called
    one_token = (reader.patch_size * reader.merge_size) ** 2
    if most < one_token:
        raise ConfigurationError(f"{name} is {most}; set at least the {one_token} pixels of one token")
    reader.size = type(reader.size)(shortest_edge=min(reader.size["shortest_edge"], most), longest_edge=most)


def _checkpoint(path: str | Path) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        found = "no config.json in it" if folder.is_dir() else "no such folder"
        raise ConfigurationError(
            f"no checkpoint at {folder} ({found}): give a folder written by save_pretrained, download a Qwen3-VL "
            "checkpoint to it, or make a tiny one with build_tiny_checkpoint"
        )
    return folder
