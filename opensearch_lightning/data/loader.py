"""Endless loaders, and DataModules that resume by the number of batches trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from opensearch_lightning.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)

# What fixes an order, in words for a refused checkpoint; of a digest only that it changed can be told.
_IN_WORDS = {"global_batch": "world size × batch_size", "rows": "usable rows", "tasks": "usable tasks"}
_DIGESTS = {
    "tokens": "the rows, the processor or the tools",
    "shards": "the tasks in the shards",
    "chunks": "chunk_window, or how the rows lie in chunks",
    "weights": "the weights or the sources",
}


def check_counts(least: int, **settings: Any) -> None:
    """See that settings are whole numbers from ``least``.

    Raises:
        ConfigurationError: naming the first that is not.
    """
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{name}={value!r}; set at least {least}, a whole number.")


class BatchSource(Protocol[T_co]):
    """Makes the batches of one rank by their number."""

    def batch(self, number: int) -> T_co:
        """Batch ``number``, from 0 without end."""
        ...


class EndlessLoader(Generic[T_co]):
    """Yields batches ``start()``, ``start() + 1``, … of a source, in order, without end and without a length.

    Args:
        source: makes the batches; with workers it is copied into each.
        start: number of the first batch; asked anew each time the loader is iterated.
        num_workers: processes that make batches ahead; 0 makes them in this one.
        prepare: told the first number before workers start, to work out here what each of them would.
    """

    def __init__(
        self,
        source: BatchSource[T_co],
        start: Callable[[], int],
        *,
        num_workers: int = 0,
        prepare: Callable[[int], object] = lambda start: None,
    ) -> None:
        self._source, self._start, self._num_workers = source, start, num_workers
        self._prepare = prepare

    def __iter__(self) -> Iterator[T_co]:
        start = self._start()
        self._prepare(start)
        loader = DataLoader(
            _Stream(self._source, start),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_is,
            generator=torch.Generator(),  # a resumed run must not draw from the global one again
        )
        return iter(loader)


class _Stream(IterableDataset[Any]):
    def __init__(self, source: BatchSource[Any], start: int) -> None:
        self._source, self._start = source, start

    def __iter__(self) -> Iterator[Any]:
        # The DataLoader takes from its workers in turn, so worker w of n makes every n-th batch.
        worker = get_worker_info()
        number, step = self._start, 1
        if worker is not None:
            number, step = number + worker.id, worker.num_workers
        while True:
            yield self._source.batch(number)
            number += step


def _as_is(batch: Any) -> Any:
    return batch


class Sealed:
    """A batch that a Trainer hands through untouched, until its DataModule opens it.

    Precision plugins rebuild a batch field by field, to convert its tensors, and refuse frozen records; so does the
    transfer to a device.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class SealingLoader:
    """Seals what ``loader`` yields."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Sealed]:
        return map(Sealed, self._loader)


class SizedSealingLoader(SealingLoader):
    """Seals what a loader with a length yields."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class ResumableDataModule(L.LightningDataModule):
    """Saves how many batches were *trained*, and goes on behind them.

    What was fetched ahead and not trained is made again. A subclass names in :meth:`_order` what fixes its order; a
    checkpoint of another order is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resumed: tuple[int, L.Trainer | None] = (0, None)

    def _order(self) -> Mapping[str, int | str]:
        """What the order is a function of: equal mappings give equal orders."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Number of batches trained, with what fixes their order."""
        return {"batches": self._trained(), **self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batches of ``state_dict``.

        Raises:
            ConfigurationError: it was saved with another seed, batch, or set of rows, or does not tell how many batches
                were trained.
        """
        batches = state_dict.get("batches") if isinstance(state_dict, Mapping) else None
        if not isinstance(batches, int) or batches < 0:
            raise ConfigurationError(
                f"the checkpoint does not tell how many batches were trained (batches is {batches!r:.80}): start from "
                "its weights alone, or take another one."
            )
        for name, now in self._order().items():
            if (then := state_dict.get(name)) != now:
                difference = f"the checkpoint was made with {_IN_WORDS.get(name, name)} = {then!r}, now it is {now!r}"
                if name in _DIGESTS:
                    difference = f"{_DIGESTS[name]} changed since the checkpoint was made"
                raise ConfigurationError(
                    f"{difference}: the order of the data would change. Set it back, or start from the checkpoint's "
                    "weights alone."
                )
        self._resumed = batches, self.trainer

    def _endless(self, source: BatchSource[Any], **options: Any) -> Iterable[Any]:
        return self._for_trainer(EndlessLoader(source, self._trained, **options))

    def _for_trainer(self, loader: Iterable[Any]) -> Iterable[Any]:
        if self.trainer is None or self.trainer.state.status != TrainerStatus.RUNNING:
            return loader
        return SizedSealingLoader(loader) if isinstance(loader, Sized) else SealingLoader(loader)

    def _trained(self) -> int:
        batches, trainer = self._resumed
        if trainer is None:  # loaded by hand, before a Trainer counts from 0
            return batches + self._processed()
        # A Trainer that resumes restores its own counter too, but only after loaders may have been asked for.
        return max(batches, self._processed()) if trainer is self.trainer else self._processed()

    def _processed(self) -> int:
        # `processed` grows right behind the training step and before every hook that saves; `ready` and `started`
        # also count a batch that an exception broke off, `completed` not yet the one that is being saved behind.
        if self.trainer is None:
            return 0
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1
