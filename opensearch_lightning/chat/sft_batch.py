"""One update's rows of fine-tuning, laid out in the passes that the model reads them in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opensearch_lightning.chat.collate import ModelBatch
from opensearch_lightning.chat.packing import PackedBatch
from opensearch_lightning.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SFTBatch:
    """The rows of one update on one rank, and which source each comes from.

    Each pass is one forward and backward pass: rows padded to the longest, or packed into one row. ``source_ids`` has a
    tensor ``[B]`` int64 for each pass, whose values are places in ``sources``, the names of the sources.

    Raises:
        DataError: there is no pass, or source ids do not fit the passes.
    """

    passes: tuple[ModelBatch | PackedBatch, ...]
    source_ids: tuple[Tensor, ...]
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        rows = [len(one.step_ids) for one in self.passes]
        if not rows or rows != [len(ids) for ids in self.source_ids]:
            raise DataError(
                f"passes of {rows} rows have {[len(ids) for ids in self.source_ids]} source ids: give at least one "
                "pass, and a source for each row"
            )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SFTBatch:
        """The batch on ``device``."""
        return replace(
            self,
            passes=tuple(one.to(device, non_blocking=non_blocking) for one in self.passes),
            source_ids=tuple(ids.to(device, non_blocking=non_blocking) for ids in self.source_ids),
        )
