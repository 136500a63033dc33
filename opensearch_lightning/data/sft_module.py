"""The DataModule of supervised fine-tuning."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from opensearch_lightning.chat import SFTBatch
from opensearch_lightning.data.digests import json_digest
from opensearch_lightning.data.drops import checked_max_dropped
from opensearch_lightning.data.loader import ResumableDataModule, Sealed, check_counts
from opensearch_lightning.data.order import BatchPackPlan, FullPackPlan, LengthOrder, PaddedPlan, Plan
from opensearch_lightning.data.order.packs import best_fit, padded_passes
from opensearch_lightning.data.order.streams import Rows, row_stream
from opensearch_lightning.data.sft_batches import Layout, TrainBatches, ValLoader
from opensearch_lightning.data.shards import Shards
from opensearch_lightning.data.usable_rows import RowOpener, SFTRows, TooLong
from opensearch_lightning.errors import ConfigurationError

Packing = Literal["off", "batch", "tokens"]


class SearchVLSFTDataModule(ResumableDataModule):
    """Expert trajectories from shards, as padded or packed passes, endlessly.

    Train with ``Trainer(max_steps=…)``, where ``steps_per_epoch`` is one epoch: the train loader has no end, and
    validation is timed by ``val_check_interval`` with ``check_val_every_n_epoch=None``. What an update holds is a pure
    function of the seed and its number; resuming from a checkpoint goes on behind the last batch trained. Each rank
    takes its share of every update.

    Args:
        shards: one or more folders written by :func:`~opensearch_lightning.data.write_sft_shards`; paths,
            ``s3://bucket/prefix`` or ``http(s)://host/path``.
        processor: a processor of Qwen3-VL.
        batch_size: trajectories of an update on one rank; with ``packing="tokens"`` packs.
        val_shards: folders of held-out trajectories; none: no validation.
        val_batch_size: trajectories of a validation batch on one rank; ``batch_size`` by default.
        seed: seed of the order.
        packing: ``off`` pads rows of similar length. ``batch`` lays the ``batch_size`` × world size trajectories of an
            update (Table 4 counts trajectories) in packs, level over the ranks. ``tokens`` plans an epoch in full
            packs. No trajectory of a pack sees another, except a prompt that both begin with.
        pack_tokens: most tokens of a pack; ``max_length`` by default.
        micro_batch: without packing, most rows of a pass; ``None`` for one pass. It cuts a rank's rows in the order of
            their length, so that short rows are not padded to long ones;
            :class:`~opensearch_lightning.modules.AgenticSFT` can only split what a batch brings.
        max_tokens_per_pass: without packing, most tokens of a pass, padding counted; ``None`` for one pass.
        weights: weight of each source by name, 0 to leave it out: an epoch then is as many rows as the sources that
            take part have, in these proportions. ``None``: every row once an epoch.
        chunk_window: chunks (files of the shards) whose rows are shuffled together, for shards far away; ``None``
            shuffles all rows together.
        max_length: tokens of a row, image tokens counted.
        too_long: what becomes of a longer row: it is dropped whole (``drop``), or cut behind the last turn of the
            policy that fits (``cut``), and dropped only if there is none. Either is counted and named.
        max_dropped: largest fraction of dropped rows that is accepted.
        render_tools: put a row's tool schemas into its system turn, as the chat template does. Set it false for a
            system prompt that describes the tools itself.
        window: batches that are sorted by length together, without packing.
        num_workers: processes that make batches ahead, and that measure the rows at the start.
        cached_tokens: how many tokens are kept in memory rather than rendered again.
        lengths_dir: folder in which the rows' lengths are kept from one start to the next, and for the other ranks
            of a node, if they do not stand beside the shards. Large corpora take minutes to measure.
        cache_dir: folder in which files of shards on other machines are kept; it needs room for all of them.
        storage_options: of those machines: what boto3's client takes (``endpoint_url``, …), or ``headers`` for a web
            server.

    Raises:
        DataError: from ``setup``, when shards are missing or too many rows are unusable.
        ConfigurationError: a setting outside its range; from ``setup``, when an update takes more rows than there are,
            or weights do not fit the sources.
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
        packing: Packing = "off",
        pack_tokens: int | None = None,
        micro_batch: int | None = None,
        max_tokens_per_pass: int | None = None,
        weights: Mapping[str, float] | None = None,
        chunk_window: int | None = None,
        max_length: int = 32_000,
        too_long: TooLong = "drop",
        max_dropped: float = 0.01,
        render_tools: bool = True,
        window: int = 64,
        num_workers: int = 0,
        cached_tokens: int = 64 * 2**20,
        lengths_dir: Path | str | None = None,
        cache_dir: Path | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, batch_size=batch_size, max_length=max_length, window=window)
        check_counts(0, seed=seed, num_workers=num_workers, cached_tokens=cached_tokens)
        optional = {"val_batch_size": val_batch_size, "pack_tokens": pack_tokens, "chunk_window": chunk_window}
        optional |= {"micro_batch": micro_batch, "max_tokens_per_pass": max_tokens_per_pass}
        check_counts(1, **{name: value for name, value in optional.items() if value is not None})
        self._shards, self._val_shards = shards, val_shards
        self._batch_size, self._val_batch_size = batch_size, val_batch_size or batch_size
        self._seed, self._window, self._num_workers = seed, window, num_workers
        self._packing, self._pack_tokens = packing, pack_tokens or max_length
        self._micro_batch, self._max_tokens_per_pass = micro_batch, max_tokens_per_pass
        self._weights = dict(weights) if weights is not None else None
        self._chunk_window = chunk_window
        self._opener = RowOpener(
            processor=processor,
            max_length=max_length,
            max_dropped=checked_max_dropped(max_dropped),
            too_long=too_long,
            render_tools=render_tools,
            cached_tokens=cached_tokens,
            num_workers=num_workers,
            lengths_dir=Path(lengths_dir) if lengths_dir is not None else None,
            cache_dir=Path(cache_dir) if cache_dir is not None else None,
            storage_options=storage_options,
        )
        self._check()
        self._train: SFTRows | None = None
        self._val: SFTRows | None = None
        self._planned: tuple[int, Plan] | None = None

    def prepare_data(self) -> None:
        """Measure the rows on one rank of a node, for all of them."""
        if self._opener.lengths_dir is not None:
            for shards in (self._shards, self._val_shards):
                if shards is not None:
                    self._opener.lengths(shards)

    def setup(self, stage: str | None = None) -> None:
        """Open the shards and measure their rows."""
        if self._train is None and stage in (None, "fit"):
            self._train = SFTRows(self._shards, self._opener)
        if self._val is None and self._val_shards is not None and stage in (None, "fit", "validate"):
            self._val = SFTRows(self._val_shards, self._opener)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Open the batch behind the precision plugin; it moves itself to the device."""
        return batch.batch if isinstance(batch, Sealed) else batch

    @property
    def n_rows(self) -> int:
        """Usable training rows."""
        return len(self._ready())

    @property
    def n_cut(self) -> int:
        """Those of them that are cut."""
        return self._ready().n_cut

    @property
    def steps_per_epoch(self) -> float:
        """Updates of an epoch: with ``packing="tokens"`` of the first one, else its rows over those of an update."""
        return self._plan().steps_per_epoch

    @property
    def packing_efficiency(self) -> float:
        """Share of the first epoch's places that hold a token: of padded rows, or of the packs' ``pack_tokens``."""
        return self._plan().efficiency

    def epoch_of(self, number: int) -> int:
        """The epoch in which update ``number`` begins, both from 0."""
        return self._plan().epoch_of(number)

    def train_dataloader(self) -> Iterable[SFTBatch]:
        """Batches of this rank, from behind the last one trained."""
        plan, rank = self._plan(), self._rank
        batches = TrainBatches(Layout(self._ready(), packed=self._packing != "off"), plan, rank=rank)
        return self._endless(batches, num_workers=self._num_workers, prepare=lambda start: plan.passes(start, rank))

    def val_dataloader(self) -> Iterable[SFTBatch]:
        """The held-out rows once, from short to long, with as many batches on every rank."""
        if self._val is None:
            self.setup("validate")
        if self._val is None:
            return []
        loader = ValLoader(
            Layout(self._val, packed=self._packing != "off"),
            batch_size=self._val_batch_size,
            rank=self._rank,
            world_size=self._world_size,
            passes=partial(self._val_passes, self._val),
        )
        return self._for_trainer(loader)

    def _check(self) -> None:
        if self._packing not in get_args(Packing):
            raise ConfigurationError(f"packing={self._packing!r}; set one of {', '.join(get_args(Packing))}.")
        if self._opener.too_long not in get_args(TooLong):
            raise ConfigurationError(f"too_long={self._opener.too_long!r}; set one of {', '.join(get_args(TooLong))}.")
        if self._pack_tokens < self._opener.max_length:
            raise ConfigurationError(
                f"pack_tokens={self._pack_tokens} has no room for a row of max_length={self._opener.max_length}; "
                "raise it, or lower max_length."
            )
        limits = {"micro_batch": self._micro_batch, "max_tokens_per_pass": self._max_tokens_per_pass}
        for name, value in limits.items():
            if value is not None and self._packing != "off":
                raise ConfigurationError(f"{name}={value} is of padded passes; with packing set pack_tokens instead.")

    @property
    def _global_batch(self) -> int:
        return self._batch_size * self._world_size

    def _order(self) -> Mapping[str, int | str]:
        rows = self._ready()
        chunks, mixture = rows.source.reader.chunks, (self._weights, rows.source.reader.sources)
        return {
            "packing": self._packing,
            "seed": self._seed,
            "global_batch": self._global_batch,
            "window": self._window if self._packing == "off" else 0,
            "rows": len(rows),
            "tokens": rows.source.digest,
            "pack_tokens": self._pack_tokens if self._packing != "off" else 0,
            "too_long": f"cut at {self._opener.max_length}" if rows.n_cut else "drop",
            "chunks": json_digest([self._chunk_window, chunks]) if self._chunk_window is not None else "",
            "weights": json_digest(mixture) if self._weights is not None else "",
        }

    def _ready(self) -> SFTRows:
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        return self._train

    def _plan(self) -> Plan:
        # the world size is known only when a Trainer is attached
        if self._planned is None or self._planned[0] != self._world_size:
            self._planned = self._world_size, self._make_plan()
        return self._planned[1]

    def _make_plan(self) -> Plan:
        rows, world_size = self._ready(), self._world_size
        stream = row_stream(
            source_ids=rows.source_ids,
            sources=rows.sources,
            weights=self._weights,
            seed=self._seed,
            chunks=rows.chunks(self._chunk_window),
        )
        if self._packing == "tokens":
            return FullPackPlan(
                stream,
                lengths=rows.lengths,
                batch_size=self._batch_size,
                world_size=world_size,
                pack_tokens=self._pack_tokens,
                seed=self._seed,
            )
        if self._packing == "batch":
            return BatchPackPlan(
                stream,
                lengths=rows.lengths,
                batch_size=self._global_batch,
                world_size=world_size,
                pack_tokens=self._pack_tokens,
            )
        order = LengthOrder(
            lengths=rows.lengths, batch_size=self._global_batch, seed=self._seed, window=self._window, stream=stream
        )
        return PaddedPlan(
            order,
            lengths=rows.lengths,
            world_size=world_size,
            micro_batch=self._micro_batch,
            max_tokens=self._max_tokens_per_pass,
        )

    def _val_passes(self, rows: SFTRows, own: Rows) -> list[Rows]:
        if self._packing != "off":
            return [own[one] for one in best_fit(rows.lengths[own], self._pack_tokens)]
        return padded_passes(own, rows.lengths, micro_batch=self._micro_batch, max_tokens=self._max_tokens_per_pass)
