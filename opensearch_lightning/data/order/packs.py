"""Which rows go into one pack, by their lengths alone; pure functions of their arguments."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from opensearch_lightning.data.order.streams import Rows
from opensearch_lightning.errors import ConfigurationError

FULL = 0.99
"""A pack this full waits for no better rows."""


def best_fit(lengths: Rows, capacity: int) -> list[list[int]]:
    """Packs of at most ``capacity`` tokens by best fit, longest rows first (best-fit decreasing).

    Args:
        lengths: tokens of each row, none above ``capacity``.
        capacity: most tokens of a pack.

    Returns:
        Places in ``lengths`` of each pack.
    """
    tokens = lengths.tolist()
    smallest = min(tokens, default=0)
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # of the packs that still take a row, sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        place = bisect_left(spaces, (tokens[row], -1))
        if place == len(spaces):
            space, pack = capacity, len(packs)
            packs.append([])
        else:
            space, pack = spaces.pop(place)
        packs[pack].append(row)
        if space - tokens[row] >= smallest:
            insort(spaces, (space - tokens[row], pack))
    return packs


def level_packs(lengths: Rows, n_packs: int, capacity: int) -> list[list[int]] | None:
    """Packs of about equal tokens: longest rows first, each to the emptiest pack.

    Args:
        lengths: tokens of each row.
        n_packs: number of packs.
        capacity: most tokens of a pack.

    Returns:
        Places in ``lengths`` of each pack; ``None`` if one would overflow.
    """
    packs: list[list[int]] = [[] for _ in range(n_packs)]
    fill = [(0, pack) for pack in range(n_packs)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, pack = fill[0]
        if tokens + lengths[row] > capacity:
            return None
        packs[pack].append(row)
        heapq.heapreplace(fill, (tokens + int(lengths[row]), pack))
    return packs


def spread_packs(lengths: Rows, ranks: int, capacity: int) -> list[list[list[int]]]:
    """The packs of each rank: as few as level packs can be, equally many on each, with about equal tokens.

    Args:
        lengths: tokens of each row, none above ``capacity``.
        ranks: number of ranks. Fewer rows than packs leave some rank with fewer.
        capacity: most tokens of a pack.

    Returns:
        By rank, places in ``lengths`` of each of its packs.
    """
    each = max(1, -(-int(lengths.sum()) // (ranks * capacity)))
    tightest = best_fit(lengths, capacity)
    while (packs := level_packs(lengths, ranks * each, capacity)) is None:
        if len(tightest) <= ranks * each:
            packs = tightest  # a pass less weighs more than packs that are a little less level
            break
        each += 1
    packs.sort(key=lambda pack: -int(lengths[pack].sum()))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for pack in packs:
        tokens, rank = heapq.heappop(load)
        if pack:
            shares[rank].append(pack)
        if len(shares[rank]) < each:
            heapq.heappush(load, (tokens + int(lengths[pack].sum()), rank))
    return shares


def full_packs(
    rows: Rows, lengths: Rows, capacity: int, *, rng: np.random.Generator, multiple: int = 1, window: int = 8192
) -> list[Rows]:
    """Packs of an epoch, in the order of training: each row once, the packs as full as best fit makes them.

    Windows of the rows are packed one behind the other, and the packs of a window shuffled. Rows of packs that are not
    :data:`FULL` wait for the next window, up to a quarter of one. Packs at the end are split until their number
    divides.

    Args:
        rows: the rows of the epoch in their order.
        lengths: tokens of each row, by its number; none above ``capacity``.
        capacity: most tokens of a pack.
        rng: shuffles the packs of a window.
        multiple: what the number of packs must be a multiple of.
        window: rows packed together.

    Raises:
        ConfigurationError: there are too few rows for such a multiple.
    """
    packs: list[Rows] = []
    waiting = rows[:0]
    for start in range(0, len(rows), window):
        pool = np.concatenate([waiting, rows[start : start + window]])
        planned = [pool[pack] for pack in best_fit(lengths[pool], capacity)]
        most = 0 if start + window >= len(rows) else window // 4
        n_waiting = _emptiest(planned, lengths, capacity, most)
        waiting = np.concatenate([rows[:0], *planned[:n_waiting]])
        done = planned[n_waiting:]
        packs += [done[place] for place in rng.permutation(len(done))]
    return _split(packs, multiple)


def padded_passes(rows: Rows, lengths: Rows, *, micro_batch: int | None, max_tokens: int | None) -> list[Rows]:
    """Rows, from short to long, cut into passes.

    Args:
        rows: the rows of a rank.
        lengths: tokens of each row, by its number.
        micro_batch: most rows of a pass; ``None`` for any number.
        max_tokens: most tokens of a pass, padding counted; a longer row is alone. ``None`` for any number.
    """
    passes: list[list[int]] = []
    longest = 0
    for row in rows.tolist():
        size = len(passes[-1]) + 1 if passes else 1
        longest = max(longest, int(lengths[row]))
        if not passes or size > (micro_batch or size) or size * longest > (max_tokens or size * longest):
            passes.append([])
            longest = int(lengths[row])
        passes[-1].append(row)
    return [np.array(one, dtype=np.int64) for one in passes]


def fill_share(packs: Sequence[Rows], lengths: Rows, capacity: int) -> float:
    """Share of the packs' capacity that holds tokens."""
    return sum(int(lengths[pack].sum()) for pack in packs) / (len(packs) * capacity)


def _emptiest(planned: list[Rows], lengths: Rows, capacity: int, most: int) -> int:
    """Sorts packs from empty to full; how many of the first, with ``most`` rows together, are not full."""
    fill = {id(pack): int(lengths[pack].sum()) for pack in planned}
    planned.sort(key=lambda pack: fill[id(pack)])
    n_rows = 0
    for number, pack in enumerate(planned):
        n_rows += len(pack)
        if n_rows > most or fill[id(pack)] >= FULL * capacity:
            return number
    return len(planned)


def _split(packs: list[Rows], multiple: int) -> list[Rows]:
    while wanted := -len(packs) % multiple:
        several = [place for place in reversed(range(len(packs))) if len(packs[place]) > 1][:wanted]
        if not several:
            raise ConfigurationError(
                f"an epoch of {len(packs)} rows makes no multiple of {multiple} packs (world size × batch_size); "
                "lower batch_size, or use fewer ranks."
            )
        for place in several:
            packs[place : place + 1] = [packs[place][::2], packs[place][1::2]]
    return packs
