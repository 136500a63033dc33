"""One rank's share of a fine-tuning update, in the parts that are read in one pass each.

Shapes: ``B`` rows of a part, ``T`` tokens of the longest, ``S`` sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch

UNNAMED = ("",)
"""Sources of a batch that names none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one forward pass, and the source of each; an idle one only keeps step with other ranks."""

    batch: ModelBatch | PackedBatch
    source_ids: Tensor  # [B] int64
    idle: bool = False

    @property
    def supervised(self) -> Tensor:
        """Mask ``[B, T]`` of the tokens that are trained: those of the policy."""
        return self.batch.step_ids >= 0

    def by_source(self, values_B: Tensor, n_sources: int) -> Tensor:
        """Sums ``[S]`` of a value of each row over the rows of each source, in float64; 0 for an idle part."""
        sums_S = torch.zeros(n_sources, dtype=torch.float64, device=values_B.device)
        return sums_S if self.idle else sums_S.index_add_(0, self.source_ids, values_B.detach().double())


def as_sft_batch(batch: ModelBatch | PackedBatch | SFTBatch) -> SFTBatch:
    """``batch`` with a source: that of a single pass has no name."""
    if isinstance(batch, SFTBatch):
        return batch
    ids = torch.zeros(len(batch.step_ids), dtype=torch.long, device=batch.step_ids.device)
    return SFTBatch(passes=(batch,), source_ids=(ids,), sources=UNNAMED)


def parts_of(batch: SFTBatch, micro_batch: int | None, config: Any) -> list[Part]:
    """The parts of a batch: packed passes as they are, padded ones in at most ``micro_batch`` rows each.

    Args:
        batch: of one rank.
        micro_batch: rows of a part; ``None`` takes padded passes whole too.
        config: the policy's configuration.
    """
    parts = []
    for one, ids in zip(batch.passes, batch.source_ids, strict=True):
        if isinstance(one, PackedBatch) or micro_batch is None or len(ids) <= micro_batch:
            parts.append(Part(batch=one, source_ids=ids))
            continue
        pieces = zip(split_rows(one, micro_batch, config), ids.split(micro_batch), strict=True)
        parts += [Part(batch=rows, source_ids=of_rows) for rows, of_rows in pieces]
    return parts


def filled_up(parts: list[Part], passes: int) -> list[Part]:
    """``parts``, and as many idle ones behind them as make ``passes``."""
    return parts + [replace(parts[-1], idle=True)] * (passes - len(parts))


def split_rows(batch: ModelBatch, size: int, config: Any) -> Iterator[ModelBatch]:
    """A padded batch in parts of ``size`` rows each, trimmed to their own longest row, with the images of their rows.

    Args:
        batch: batch padded on the right.
        size: rows of a part; the last may have fewer.
        config: the policy's configuration, which knows the image token and the merging of patches.
    """
    merged = config.vision_config.spatial_merge_size**2
    first_image = first_patch = 0
    for start in range(0, len(batch.input_ids), size):
        rows = slice(start, start + size)
        length = int(batch.valid[rows].sum(1).max())
        tokens = int((batch.input_ids[rows, :length] == config.image_token_id).sum())
        patches = slice(first_patch, first_patch + tokens * merged)
        grids = batch.image_grid_thw
        images = slice(first_image, first_image)
        if grids is not None:
            ends = grids.prod(-1).cumsum(0)
            images = slice(first_image, int((ends <= patches.stop).sum()))
        yield ModelBatch(
            input_ids=batch.input_ids[rows, :length],
            position_ids=batch.position_ids[:, rows, :length],
            step_ids=batch.step_ids[rows, :length],
            valid=batch.valid[rows, :length],
            pixel_values=batch.pixel_values[patches] if batch.pixel_values is not None and tokens else None,
            image_grid_thw=grids[images] if grids is not None and tokens else None,
        )
        first_image, first_patch = images.stop, patches.stop
