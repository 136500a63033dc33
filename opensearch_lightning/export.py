"""A policy as a folder that transformers loads: from weights that lie on several ranks or in a checkpoint's parts."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.paths import check_folder, put_in_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch export``."""
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint written under DeepSpeed")
    parser.add_argument("out", type=Path, help="folder for the policy with its processor; must not exist")
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the policy the training began with (its model.path)"
    )
    parser.add_argument(
        "--lora-alpha", type=float, help="of a checkpoint with adapters, to merge them: its model.policy.lora.alpha"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``opensearch export``; returns the exit code.

    Raises:
        OpenSearchError: the checkpoint, the model or the folder cannot be used; nothing was written.
    """
    from transformers import AutoConfig, GenerationConfig

    from opensearch_lightning.models import load_processor
    from opensearch_lightning.strategies import consolidated_weights

    check_folder("the folder to write", args.out)
    if args.out.exists():
        raise ConfigurationError(f"{args.out} exists; name a new folder, or remove it")
    processor = load_processor(args.model)
    config = AutoConfig.from_pretrained(args.model, local_files_only=True)
    generation = None
    if (args.model / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(args.model, local_files_only=True)
    dtype = config.dtype or torch.float32
    weights = in_dtype(consolidated_weights(args.checkpoint), dtype)
    write_policy(
        weights,
        args.out,
        config=config,
        generation_config=generation,
        processor=processor,
        lora_alpha=args.lora_alpha,
    )
    print(f"done: {args.out}", file=sys.stdout)
    return 0


def in_dtype(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the weights in main memory, of one type; adapters, which are yet to be merged, in float32."""
    from opensearch_lightning.models import is_adapter

    return {name: weight.to("cpu", torch.float32 if is_adapter(name) else dtype, copy=True) for name, weight in weights}


def write_policy(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    config: Any,
    processor: Any,
    generation_config: Any = None,
    lora_alpha: float | None = None,
) -> None:
    """Write a policy and its processor as ``folder``, in place of what lies there; all or nothing.

    Adapters are merged into the weights they belong to, so that transformers alone loads what is written.

    Args:
        weights: value of each parameter by the policy's own names; of tied ones, any.
        folder: takes the files.
        config: the policy's configuration.
        processor: saved beside it.
        generation_config: settings of generation, if the policy has some of its own.
        lora_alpha: of the adapters among the weights, if there are any.

    Raises:
        ConfigurationError: a parameter is missing, or there is one that the configuration does not know, or there are
            adapters and no ``lora_alpha``.
    """
    from opensearch_lightning.models import is_adapter, merge_adapters

    if any(map(is_adapter, weights)):
        if lora_alpha is None:
            raise ConfigurationError(
                "the weights hold adapters, and how strong they are is not known: give --lora-alpha, the "
                "model.policy.lora.alpha of that run (see config.yaml in its folder)"
            )
        weights = merge_adapters(weights, lora_alpha)
    policy = _assembled(weights, config)
    if generation_config is not None:
        policy.generation_config = generation_config
    save_whole(policy, processor, folder)


def save_whole(policy: Any, processor: Any, folder: Path) -> None:
    """Save both as ``folder``, in place of what lies there; all or nothing."""
    scratch = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    policy.save_pretrained(scratch)
    processor.save_pretrained(scratch)
    put_in_place(scratch, folder)


def _assembled(weights: Mapping[str, Tensor], config: Any) -> Any:
    """A policy around these very tensors."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        policy = AutoModelForImageTextToText.from_config(config, dtype=next(iter(weights.values())).dtype)
    unknown = policy.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    policy.tie_weights()
    missing = [name for name, parameter in policy.named_parameters() if parameter.is_meta]
    if unknown or missing:
        wrong = f"lacks {missing[0]}" if missing else f"holds {unknown[0]}, which the model has not"
        raise ConfigurationError(
            f"the checkpoint {wrong}; give the model that the training began with, and keep frozen parameters in "
            "checkpoints (exclude_frozen_parameters=false)"
        )
    return policy
