"""Groups in the making and groups that wait to be trained, and which of them a training step takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import Task, TrajectoryGroup

if TYPE_CHECKING:
    from opensearch_lightning.rollout.ledger import TaskPlace

OnStale = Literal["wait", "drop"]


@dataclass(eq=False, kw_only=True)
class PendingGroup:
    """A group that was submitted and not trained yet.

    ``begun`` is the engine's weight version when its first rollout started, which is never later than that of its
    first token; ``group`` is there once all its rollouts have ended.
    """

    place: TaskPlace
    task: Task
    begun: int | None = None
    group: TrajectoryGroup | None = None


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a step trains, and what became too old for any later step and is dropped."""

    chosen: tuple[PendingGroup, ...]
    dropped: tuple[PendingGroup, ...] = ()


class ReplayBuffer:
    """Groups in order of submission; threads may share it.

    Args:
        max_staleness: weight versions that may lie between a group's first token and the weights that it trains.
        on_stale: ``"wait"``: a step waits for the groups that would be too old for later ones, so that none is lost;
            ``"drop"``: it takes what is ready, and those groups are dropped.

    Raises:
        ConfigurationError: a setting is unknown or negative.
    """

    def __init__(self, *, max_staleness: int, on_stale: OnStale = "wait") -> None:
        if max_staleness < 0:
            raise ConfigurationError(f"max_staleness is {max_staleness}; set 0 (on policy) or more")
        if on_stale not in get_args(OnStale):
            raise ConfigurationError(f"on_stale is {on_stale!r}; set one of {', '.join(get_args(OnStale))}")
        self.max_staleness = max_staleness
        self.on_stale: OnStale = on_stale
        self._pending: list[PendingGroup] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def n_ready(self) -> int:
        """Groups that wait to be trained."""
        with self._changed:
            return sum(pending.group is not None for pending in self._pending)

    def add(self, pending: PendingGroup) -> None:
        """Append a group that will be made."""
        with self._changed:
            self._pending.append(pending)

    def begin(self, pending: PendingGroup, version: int) -> None:
        """The first rollout of ``pending`` starts under weights ``version``; later calls change nothing."""
        with self._changed:
            if pending.begun is None:
                pending.begun = version

    def complete(self, pending: PendingGroup, group: TrajectoryGroup) -> None:
        """All rollouts of ``pending`` have ended."""
        with self._changed:
            pending.group = group
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Hand ``error`` to whoever takes groups now or later; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the making of a group raised, if anything."""
        if self._error is not None:
            raise self._error

    def take(self, *, version: int, size: int) -> Taken:
        """Wait for the groups of the step that trains weights ``version``, and take them out.

        There are ``size`` of them, fewer only where no more were submitted.

        Raises:
            BaseException: what :meth:`fail` was given.
        """
        with self._changed:
            while True:
                self.check()
                chosen = self._choose(version, min(size, len(self._pending)))
                if chosen is not None:
                    break
                self._changed.wait()
            rest = [pending for pending in self._pending if pending not in chosen]
            last = version - self.max_staleness
            dropped = [p for p in rest if self.on_stale == "drop" and p.begun is not None and p.begun <= last]
            self._pending = [pending for pending in rest if pending not in dropped]
            return Taken(chosen=tuple(chosen), dropped=tuple(dropped))

    def _choose(self, version: int, size: int) -> list[PendingGroup] | None:
        if self.on_stale == "drop":
            ready = sorted((p for p in self._pending if p.group is not None), key=lambda p: p.begun or 0)
            return ready[:size] if len(ready) >= size else None
        return choose(self._pending, version=version, size=size, max_staleness=self.max_staleness)


def choose(
    pending: Sequence[PendingGroup], *, version: int, size: int, max_staleness: int
) -> list[PendingGroup] | None:
    """The ``size`` groups to train weights ``version`` with, or ``None`` while some that must be among them run.

    Groups that are ready come in order of submission, except that enough must go now of those that grow too old: of
    the groups that can be trained up to ``n`` versions from now at most, all but ``n * size`` are due in this step,
    for every ``n``. As long as no more than ``(max_staleness + 1) * size`` groups are submitted at a time, every group
    is so trained in time.
    """
    chosen: list[PendingGroup] = []
    for later in range(max_staleness + 1):
        bound = version + later - max_staleness
        aging = [p for p in pending if p.begun is not None and p.begun <= bound and p not in chosen]
        n_due = len(aging) + sum(p.begun is not None and p.begun <= bound for p in chosen) - later * size
        ready = [p for p in aging if p.group is not None]
        needed = max(0, n_due - len(chosen))
        if needed > len(ready):
            return None
        chosen += ready[:needed]
    others = [p for p in pending if p.group is not None and p not in chosen]
    chosen += others[: max(0, size - len(chosen))]
    return chosen if len(chosen) >= size else None
