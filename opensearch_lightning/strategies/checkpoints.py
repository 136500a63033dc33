"""Checkpoints that are folders, with one file a rank, as DeepSpeed writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ShardedLayout:
    """How a checkpoint lies in its folder.

    Attributes:
        stage: 2 or 3; ZeRO 1 writes what 2 writes.
        world_size: ranks of the training that wrote it.
        folder: where the files lie.
    """

    stage: int
    world_size: int
    folder: Path


def read_layout(path: str | Path) -> ShardedLayout:
    """Stage and number of ranks of a checkpoint folder, from the names of its files.

    Raises:
        ConfigurationError: it is no checkpoint of ZeRO, or files of some ranks are missing.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"{path} {what}; a checkpoint of DeepSpeed is a folder, with a file for each rank")
    try:
        folder = path / (path / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        folder = path / "checkpoint"
    parts = _ranks(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    models = _ranks(folder, r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
    whole = (folder / "mp_rank_00_model_states.pt").is_file()
    if not parts or not (models or whole):
        raise ConfigurationError(f"{path} is no checkpoint of ZeRO: {folder} lacks the files of its ranks")
    world_size = max(parts | models) + 1
    missing = sorted(set(range(world_size)) - parts | (set(range(world_size)) - models if models else set()))
    if missing:
        raise ConfigurationError(
            f"{path} is incomplete: of {world_size} ranks, the files of rank {', '.join(map(str, missing))} are missing"
        )
    return ShardedLayout(stage=3 if models else 2, world_size=world_size, folder=folder)


def check_continues(path: str | Path, *, stage: int, world_size: int) -> ShardedLayout:
    """See that a run of this stage and number of ranks can go on from the checkpoint.

    Raises:
        ConfigurationError: it is no checkpoint of ZeRO, or one of another stage or number of ranks.
    """
    layout = read_layout(path)
    if layout.world_size != world_size:
        raise ConfigurationError(
            f"{path} was written by {layout.world_size} ranks and this run has {world_size}; go on with "
            f"{layout.world_size}, or start from its weights: opensearch export {path} <folder> --model <model.path>, "
            "then model.path=<folder>"
        )
    if layout.stage != stage:
        raise ConfigurationError(
            f"{path} was written under ZeRO-{layout.stage} and this run is ZeRO-{stage}; set the stage as in that run"
        )
    return layout


def saved_names(layout: ShardedLayout) -> tuple[frozenset[str], dict[str, tuple[int, ...]]]:
    """Keys of the trainer's state in a checkpoint, and name and shape of each trained parameter.

    Raises:
        ConfigurationError: the file of rank 0 cannot be read.
    """
    prefix = "zero_pp_rank_0_" if layout.stage == 3 else ""
    path = layout.folder / f"{prefix}mp_rank_00_model_states.pt"
    try:
        # the file holds objects of DeepSpeed's own, and is trusted as much as the resume itself trusts it
        saved: dict[str, Any] = torch.load(path, map_location="meta", mmap=True, weights_only=False)
        shapes = {name: tuple(shape) for group in saved["param_shapes"] for name, shape in group.items()}
    except Exception as error:
        raise ConfigurationError(f"{path} cannot be read ({type(error).__name__})") from error
    return frozenset(saved), shapes


def consolidated_weights(path: str | Path, *, prefix: str = "policy.") -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each parameter under ``prefix``, put together from the parts of all ranks.

    Args:
        path: folder of the checkpoint.
        prefix: of the parameters wanted; it is cut off.

    Yields:
        ``(name, value)``: trained parameters in float32, as the optimizer kept them, frozen ones as they are.

    Raises:
        ConfigurationError: it is no checkpoint of ZeRO, or holds no such parameters.
    """
    layout = read_layout(path)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(
        str(layout.folder.parent), tag=layout.folder.name, lazy_mode=True
    )
    names = [name for name in weights if name.startswith(prefix)]
    if not names:
        raise ConfigurationError(f"{path} holds no parameter that begins with {prefix!r}; {_example(weights)}")
    for name in names:
        yield name.removeprefix(prefix), weights[name].contiguous()


def _example(names: Collection[str]) -> str:
    return f"it holds {next(iter(names))!r} and {len(names) - 1} more" if names else "it holds none at all"


def _ranks(folder: Path, pattern: str) -> set[int]:
    matches = [re.fullmatch(pattern, file.name) for file in folder.glob("*.pt")]
    return {int(match[1]) for match in matches if match}
