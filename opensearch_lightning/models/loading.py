"""Loading policies and processors from a folder, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForImageTextToText, AutoProcessor

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.router import float32_router as make_routers_float32

HEAD_DTYPES = ("float32", "float64")


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    train_vision: bool = True,
    head_dtype: str | None = None,
    gradient_checkpointing: bool = False,
    float32_router: bool = False,
) -> Any:
    """Load a Qwen3-VL checkpoint as a policy to train.

    Args:
        path: folder of the checkpoint.
        dtype: of the weights, by torch's name.
        attn_implementation: attention of transformers (``"sdpa"``, ``"flash_attention_2"``, ``"eager"``).
        train_vision: whether vision tower and projector are trained; otherwise they are frozen.
        head_dtype: type in which the output layer computes, ``"float32"`` or ``"float64"``; ``None`` for the type of
            its weights, which stay as they are. Engine and trainer batch differently and so round differently; one
            precision more in this layer brings their log-probabilities closer (as in MiniMax-M1, arXiv 2506.13585).
            The matrix is converted at each call, so a large vocabulary needs room for a second one.
        gradient_checkpointing: keep only the inputs of each layer for the backward pass and compute the rest again:
            about a third more time for a fraction of the memory.
        float32_router: routers of a mixture of experts compute in float32, whatever the type of the weights (Table 5).

    Raises:
        ConfigurationError: if there is no checkpoint at ``path``, the output layer cannot compute in that type, or the
            model has no router.
    """
    if head_dtype not in (None, *HEAD_DTYPES):
        raise ConfigurationError(f"head_dtype is {head_dtype!r}; set one of {', '.join(HEAD_DTYPES)}, or null")
    folder = _checkpoint(path)
    policy = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    policy.model.visual.requires_grad_(train_vision)
    if head_dtype is not None:
        policy.lm_head = OutputLayer(policy.lm_head, getattr(torch, head_dtype))
    if float32_router:
        make_routers_float32(policy)
    if gradient_checkpointing:
        # the reentrant kind needs inputs that require gradients, which a frozen vision tower's are not
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


class OutputLayer(nn.Linear):
    """An output layer that computes in another type than its weight, which it shares with ``layer``."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.compute_dtype = dtype

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits in ``compute_dtype``."""
        # autocast would take the precision away again, and the engine runs outside of it
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(self.compute_dtype), self.weight.to(self.compute_dtype))


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
