"""Loading policies and processors from a folder, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor

from opensearch_lightning.errors import ConfigurationError


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    train_vision: bool = True,
) -> Any:
    """Load a Qwen3-VL checkpoint as a policy to train.

    Args:
        path: folder of the checkpoint.
        dtype: of the weights, by torch's name.
        attn_implementation: attention of transformers (``"sdpa"``, ``"flash_attention_2"``, ``"eager"``).
        train_vision: whether vision tower and projector are trained; otherwise they are frozen.

    Raises:
        ConfigurationError: if there is no checkpoint at ``path``.
    """
    folder = _checkpoint(path)
    policy = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    policy.model.visual.requires_grad_(train_vision)
    return policy


def load_processor(path: str | Path) -> Any:
    """Load the processor (tokenizer, image processor, chat template) of a checkpoint.

    Raises:
        ConfigurationError: if there is no checkpoint at ``path``.
    """
    return AutoProcessor.from_pretrained(_checkpoint(path), local_files_only=True)


def _checkpoint(path: str | Path) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        found = "no config.json in it" if folder.is_dir() else "no such folder"
        raise ConfigurationError(
            f"no checkpoint at {folder} ({found}): give a folder written by save_pretrained, download a Qwen3-VL "
            "checkpoint to it, or make a tiny one with build_tiny_checkpoint"
        )
    return folder
