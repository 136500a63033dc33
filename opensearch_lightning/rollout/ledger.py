"""Which tasks of the data's order were handed out to be rolled out, and which of them are still to be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TaskPlace = tuple[int, int]
"""Number of a batch in the order of the data, and place in it."""


class TaskLedger:
    """Hands out the places of tasks in the order of the data, and keeps which of them are open.

    A step trains what is ready, which need not be the batch whose turn it is; with this a resumed run trains each task
    once all the same.
    """

    def __init__(self, first_batch: int = 0) -> None:
        self._next: TaskPlace = (first_batch, 0)
        self._open: set[TaskPlace] = set()

    @property
    def open(self) -> list[TaskPlace]:
        """Places that were handed out and not settled, in order."""
        return sorted(self._open)

    def hand_out(self, batch_size: int) -> TaskPlace:
        """The next place of batches of ``batch_size`` tasks."""
        number, place = handed_out = self._next
        self._next = (number, place + 1) if place + 1 < batch_size else (number + 1, 0)
        self._open.add(handed_out)
        return handed_out

    def settle(self, places: Iterable[TaskPlace]) -> None:
        """These were trained, or dropped for good."""
        self._open.difference_update(places)

    def state(self, settled: Iterable[TaskPlace] = ()) -> dict[str, Any]:
        """Plain lists to save; ``settled`` counts as settled already."""
        open_places = sorted(self._open.difference(settled))
        return {"next": list(self._next), "open": [list(place) for place in open_places]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TaskLedger:
        """The ledger that :meth:`state` described."""
        ledger = cls()
        number, place = state["next"]
        ledger._next = (number, place)
        ledger._open = {(number, place) for number, place in state["open"]}
        return ledger
