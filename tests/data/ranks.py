"""A stand-in for a Trainer of several ranks, for what a DataModule asks of it."""

from types import SimpleNamespace
from typing import Any

import lightning as L


def on_rank(data: L.LightningDataModule, rank: int, world_size: int) -> Any:
    """``data``, as if attached to the Trainer of one rank that is not running."""
    total = SimpleNamespace(processed=0)
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)))
    stub: Any = SimpleNamespace(
        global_rank=rank, world_size=world_size, fit_loop=loops, state=SimpleNamespace(status="finished")
    )
    data.trainer = stub
    return data
