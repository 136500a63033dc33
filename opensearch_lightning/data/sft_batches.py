"""Rows laid out as the batches of fine-tuning, for training and for validation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch, TokenizedSample, collate, pack
from opensearch_lightning.data.order.plans import Plan
from opensearch_lightning.data.order.streams import Rows
from opensearch_lightning.data.usable_rows import SFTRows


class Layout:
    """Makes batches of rows.

    Args:
        rows: the rows.
        packed: lay the rows of a pass in one row without padding, rather than pad them to the longest.
    """

    def __init__(self, rows: SFTRows, *, packed: bool) -> None:
        self.rows, self.packed = rows, packed

    def batch(self, passes: Sequence[Rows]) -> SFTBatch:
        """The rows of each pass as one batch."""
        return SFTBatch(
            passes=tuple(self.lay([self.rows.sample(int(row)) for row in one]) for one in passes),
            source_ids=tuple(torch.from_numpy(self.rows.source_ids[one]) for one in passes),
            sources=self.rows.sources,
        )

    def lay(self, samples: Sequence[TokenizedSample]) -> ModelBatch | PackedBatch:
        """Samples as one pass."""
        renderer = self.rows.source.renderer
        options = {"image_token_id": renderer.image_token_id, "merge_size": renderer.merge_size}
        return pack(samples, **options) if self.packed else collate(samples, pad_id=renderer.pad_id, **options)


class TrainBatches:
    """The batches of one rank, by the number of the update."""

    def __init__(self, layout: Layout, plan: Plan, *, rank: int) -> None:
        self._layout, self._plan, self._rank = layout, plan, rank

    def batch(self, number: int) -> SFTBatch:
        """Batch ``number``, from 0 without end."""
        return self._layout.batch(self._plan.passes(number, self._rank))


class ValLoader:
    """Every row once, from short to long, with as many batches on every rank.

    Sized, and no DataLoader: Lightning would split one among the ranks once more.

    Args:
        layout: makes the batches.
        batch_size: rows of a batch on one rank.
        rank: this rank.
        world_size: number of ranks.
        passes: the passes of a rank's rows, which come from short to long.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        passes: Callable[[Rows], list[Rows]],
    ) -> None:
        self._layout, self._passes = layout, passes
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._order = layout.rows.lengths.argsort(kind="stable")

    def __len__(self) -> int:
        return -(-len(self._order) // (self._batch_size * self._world_size))

    def __iter__(self) -> Iterator[SFTBatch]:
        size = self._batch_size * self._world_size
        for start in range(0, len(self._order), size):
            own = self._order[start : start + size][self._rank :: self._world_size]
            yield self._layout.batch(self._passes(own)) if len(own) else self._uncounted()

    def _uncounted(self) -> SFTBatch:
        """A rank left without a row still takes part: it reads one that counts nothing."""
        first = self._order[:1]
        sample = self._layout.rows.sample(int(first[0]))
        silent = replace(sample, step_ids=torch.full_like(sample.step_ids, -1))
        return replace(self._layout.batch([first]), passes=(self._layout.lay([silent]),))
