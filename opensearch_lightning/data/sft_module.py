"""The DataModule of supervised fine-tuning."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opensearch_lightning.chat import ModelBatch, TokenizedSample, collate
from opensearch_lightning.data.drops import checked_max_dropped
from opensearch_lightning.data.lengths import Lengths, measure, usable
from opensearch_lightning.data.loader import ResumableDataModule, Sealed
from opensearch_lightning.data.order import LengthOrder, Rows
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.shards import ShardKind, ShardReader, Shards


class SearchVLSFTDataModule(ResumableDataModule):
    """Expert trajectories from shards, as padded batches, endlessly.

    Train with ``Trainer(max_steps=…)``: the train loader has no end, and validation is timed by
    ``val_check_interval`` with ``check_val_every_n_epoch=None``. Batches hold rows of similar length and are a pure
    function of the seed and their number; resuming from a checkpoint goes on behind the last batch trained. Each rank
    takes its share of every global batch.

    Args:
        shards: one or more folders written by :func:`~opensearch_lightning.data.write_sft_shards`.
        processor: a processor of Qwen3-VL.
        batch_size: trajectories of a batch on one rank.
        val_shards: folders of held-out trajectories; none: no validation.
        val_batch_size: trajectories of a validation batch on one rank; ``batch_size`` by default.
        seed: seed of the order.
        max_length: tokens of a row, image tokens counted; a longer one is dropped whole and named.
        max_dropped: largest fraction of dropped rows that is accepted.
        render_tools: put a row's tool schemas into its system turn, as the chat template does. Set it false for a
            system prompt that describes the tools itself.
        window: batches that are sorted by length together.
        num_workers: processes that make batches ahead, and that measure the rows at the start.
        cached_tokens: how many tokens are kept in memory rather than rendered again.
        lengths_dir: folder in which the rows' lengths are kept from one start to the next, and for the other ranks
            of a node. Large corpora take minutes to measure.

    Raises:
        DataError: from ``setup``, when shards are missing or too many rows are unusable.
        ConfigurationError: ``max_dropped`` outside [0, 1]; from ``setup``, when a global batch takes more rows than
            there are.
    """

    def __init__(
        self,
        shards: Shards,
        processor: Any,
        *,
        batch_size: int,
        val_shards: Shards | None = None,
        val_batch_size: int | None = None,
        seed: int = 3407,
        max_length: int = 32_000,
        max_dropped: float = 0.01,
        render_tools: bool = True,
        window: int = 64,
        num_workers: int = 0,
        cached_tokens: int = 64 * 2**20,
        lengths_dir: Path | str | None = None,
    ) -> None:
        super().__init__()
        self._shards, self._val_shards = shards, val_shards
        self._processor = processor
        self._batch_size, self._val_batch_size = batch_size, val_batch_size or batch_size
        self._seed, self._window, self._num_workers = seed, window, num_workers
        self._max_length, self._max_dropped = max_length, checked_max_dropped(max_dropped)
        self._render_tools, self._cached_tokens = render_tools, cached_tokens
        self._lengths_dir = Path(lengths_dir) if lengths_dir is not None else None
        self._train: _Split | None = None
        self._val: _Split | None = None

    def prepare_data(self) -> None:
        """Measure the rows on one rank of a node, for all of them."""
        if self._lengths_dir is not None:
            for shards in (self._shards, self._val_shards):
                if shards is not None:
                    self._measured(shards)

    def setup(self, stage: str | None = None) -> None:
        """Open the shards and measure their rows."""
        if self._train is None and stage in (None, "fit"):
            self._train = self._open(self._shards)
        if self._val is None and self._val_shards is not None and stage in (None, "fit", "validate"):
            self._val = self._open(self._val_shards)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Open the batch behind the precision plugin; it moves itself to the device."""
        return batch.batch if isinstance(batch, Sealed) else batch

    @property
    def n_rows(self) -> int:
        """Usable training rows."""
        return len(self._ready().rows)

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every training row comes once."""
        return self.n_rows / self._global_batch

    def train_dataloader(self) -> Iterable[ModelBatch]:
        """Batches of this rank, from behind the last one trained."""
        split = self._ready()
        order = LengthOrder(lengths=split.lengths, batch_size=self._global_batch, seed=self._seed, window=self._window)
        batches = _TrainBatches(split, order, rank=self._rank, world_size=self._world_size)
        return self._endless(batches, num_workers=self._num_workers)

    def val_dataloader(self) -> Iterable[ModelBatch]:
        """The held-out rows once, from short to long, with as many batches on every rank."""
        if self._val is None:
            self.setup("validate")
        if self._val is None:
            return []
        loader = _ValLoader(self._val, batch_size=self._val_batch_size, rank=self._rank, world_size=self._world_size)
        return self._for_trainer(loader)

    @property
    def _global_batch(self) -> int:
        return self._batch_size * self._world_size

    def _order(self) -> Mapping[str, int | str]:
        split = self._ready()
        return {
            "seed": self._seed,
            "global_batch": self._global_batch,
            "window": self._window,
            "rows": len(split.rows),
            "tokens": split.source.digest,
        }

    def _ready(self) -> "_Split":
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        return self._train

    def _measured(self, shards: Shards) -> tuple[SampleSource, Lengths]:
        source = SampleSource(
            ShardReader(shards, kind=ShardKind.SFT),
            self._processor,
            render_tools=self._render_tools,
            cached_tokens=self._cached_tokens,
        )
        return source, measure(source, num_workers=self._num_workers, folder=self._lengths_dir)

    def _open(self, shards: Shards) -> "_Split":
        source, measured = self._measured(shards)
        rows, lengths = usable(source, measured, max_length=self._max_length, max_dropped=self._max_dropped)
        return _Split(source, rows, lengths)


class _Split:
    def __init__(self, source: SampleSource, rows: Rows, lengths: Lengths) -> None:
        self.source, self.rows, self.lengths = source, rows, lengths

    def collate(self, samples: Sequence[TokenizedSample]) -> ModelBatch:
        renderer = self.source.renderer
        return collate(
            samples,
            pad_id=renderer.pad_id,
            image_token_id=renderer.image_token_id,
            merge_size=renderer.merge_size,
        )


class _TrainBatches:
    def __init__(self, split: _Split, order: LengthOrder, *, rank: int, world_size: int) -> None:
        self._split, self._order = split, order
        self._rank, self._world_size = rank, world_size

    def batch(self, number: int) -> ModelBatch:
        # Every n-th of rows sorted by length: the ranks get about as many tokens each.
        own = self._order.batch(number)[self._rank :: self._world_size]
        return self._split.collate([self._split.source.sample(int(row)) for row in self._split.rows[own]])


class _ValLoader:
    """Sized, and no DataLoader: Lightning would split one among the ranks once more."""

    def __init__(self, split: _Split, *, batch_size: int, rank: int, world_size: int) -> None:
        self._split = split
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._rows = split.rows[split.lengths.argsort(kind="stable")]

    def __len__(self) -> int:
        return -(-len(self._rows) // (self._batch_size * self._world_size))

    def __iter__(self) -> Iterator[ModelBatch]:
        size = self._batch_size * self._world_size
        for start in range(0, len(self._rows), size):
            own = self._rows[start : start + size][self._rank :: self._world_size]
            samples = [self._split.source.sample(int(row)) for row in own]
            # A rank left without a row still takes part: it reads one that counts nothing.
            yield self._split.collate(samples or [_unsupervised(self._split.source.sample(int(self._rows[0])))])


def _unsupervised(sample: TokenizedSample) -> TokenizedSample:
    return replace(sample, step_ids=torch.full_like(sample.step_ids, -1))
