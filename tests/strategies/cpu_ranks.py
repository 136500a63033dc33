"""Several ranks on this machine's processor, with DeepSpeed or without."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from opensearch_lightning.strategies import ZeroStrategy

PATIENCE = timedelta(minutes=5)
"""A rank that waits longer for another waits in vain."""


def without_shared_memory() -> None:
    """Keep DeepSpeed from a C++ extension for ranks of one machine, which takes minutes to build."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class CPUZeroStrategy(ZeroStrategy):
    """ZeRO over gloo; the strategies of Lightning and of this package insist on CUDA."""

    def __init__(self, stage: int, **config: Any) -> None:
        zero = {"stage": stage, "overlap_comm": False, **config.pop("zero_optimization", {})}
        if stage == 3:
            # by default all parameters of a tiny model stay whole; matrices are to be shared
            zero.setdefault("stage3_param_persistence_threshold", 500)
        super().__init__(
            config={"zero_allow_untested_optimizer": True, "zero_optimization": zero, **config},
            process_group_backend="gloo",
            timeout=PATIENCE,
        )

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        without_shared_memory()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)


def strategy(name: str, **config: Any) -> Any:
    """``"one"``, ``"ddp"``, ``"zero2"`` or ``"zero3"``."""
    if name == "one":
        return "auto"
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", timeout=PATIENCE)
    return CPUZeroStrategy(int(name.removeprefix("zero")), **config)


def trainer(name: str, max_steps: int, *callbacks: L.Callback, devices: int = 2, **options: Any) -> L.Trainer:
    """A silent Trainer of ``devices`` ranks under the strategy of that name, or of this process alone."""
    config = options.pop("config", {})
    settings: dict[str, Any] = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1 if name == "one" else devices,
        "strategy": strategy(name, **config),
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
    }
    return L.Trainer(max_steps=max_steps, callbacks=list(callbacks), **{**settings, **options})


def on_ranks(work: Callable[[], Any], folder: Path, *, ranks: int = 2) -> list[Any]:
    """What ``work`` returns in each of ``ranks`` processes that see each other.

    Raises:
        AssertionError: one of them failed; the text is its traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(work, folder, rank, ranks, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE.total_seconds() * 2)
        if process.is_alive():
            process.kill()
    failed = [(folder / f"{rank}.error").read_text() for rank in range(ranks) if (folder / f"{rank}.error").exists()]
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(work: Callable[[], Any], folder: Path, rank: int, ranks: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
    }
    try:
        torch.save(work(), folder / f"{rank}.pt")
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        code = 1
    # a rank that failed leaves the others waiting; none waits for its own threads
    os._exit(code)
