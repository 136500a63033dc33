from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from opensearch_lightning.data import LengthOrder
from opensearch_lightning.data.order.packs import best_fit, full_packs, level_packs, padded_passes, spread_packs
from opensearch_lightning.data.order.plans import BatchPackPlan, FullPackPlan, PaddedPlan, Plan
from opensearch_lightning.data.order.streams import MixedRows, ShuffledRows
from opensearch_lightning.errors import ConfigurationError

BUDGET = 32_000


def recipe_lengths(n_rows: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths of mean 6,000, at most 32,000."""
    sigma = 0.7
    drawn = np.random.default_rng(seed).lognormal(np.log(6000) - sigma**2 / 2, sigma, n_rows)
    return np.minimum(drawn, BUDGET).astype(np.int64)


def full(lengths: np.ndarray, *, batch_size: int = 1, world_size: int = 8, seed: int = 1) -> FullPackPlan:
    stream = ShuffledRows(n_rows=len(lengths), seed=seed)
    return FullPackPlan(
        stream, lengths=lengths, batch_size=batch_size, world_size=world_size, pack_tokens=BUDGET, seed=seed
    )


def in_batches(lengths: np.ndarray, *, batch_size: int = 64, world_size: int = 8) -> BatchPackPlan:
    stream = ShuffledRows(n_rows=len(lengths), seed=1)
    return BatchPackPlan(stream, lengths=lengths, batch_size=batch_size, world_size=world_size, pack_tokens=BUDGET)


def padded(lengths: np.ndarray, *, batch_size: int = 16, world_size: int = 2, **limits: int) -> PaddedPlan:
    order = LengthOrder(lengths=lengths, batch_size=batch_size, seed=1)
    return PaddedPlan(order, lengths=lengths, world_size=world_size, **limits)


def trained(plan: Plan, updates: range, world_size: int) -> list[int]:
    return [
        int(row) for n in updates for rank in range(world_size) for one in plan.passes(n, rank) for row in one.tolist()
    ]


def test_best_fit_takes_the_tightest_space() -> None:
    lengths = np.array([6, 5, 4, 3, 2])
    # 6 + 4 and 5 + 3 + 2: 4 goes beside the 6, where it leaves nothing
    assert best_fit(lengths, 10) == [[0, 2], [1, 3, 4]]
    assert best_fit(np.array([10, 1, 10]), 10) == [[0], [2], [1]]
    assert best_fit(np.array([], dtype=np.int64), 10) == []


def test_level_packs_or_none() -> None:
    lengths = np.array([7, 5, 4, 3, 1])
    packs = level_packs(lengths, 2, 12)
    assert packs is not None
    assert sorted(int(lengths[pack].sum()) for pack in packs) == [10, 10]
    assert level_packs(lengths, 2, 9) is None


def test_ranks_make_equally_many_passes_of_about_equal_tokens() -> None:
    lengths = recipe_lengths(250)
    shares = spread_packs(lengths, 8, BUDGET)
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == -(-int(lengths.sum()) // (8 * BUDGET))
    tokens = [sum(int(lengths[pack].sum()) for pack in share) for share in shares]
    assert max(tokens) < 1.02 * min(tokens)
    assert sorted(row for share in shares for pack in share for row in pack) == list(range(250))
    assert max(int(lengths[pack].sum()) for share in shares for pack in share) <= BUDGET


def test_packs_that_cannot_be_level_are_tight() -> None:
    # level packs would be 6 + 3 and 5 + 4, without room for the 2
    assert spread_packs(np.array([6, 5, 4, 3, 2]), 2, 10) == [[[0, 2]], [[1, 3, 4]]]


def test_fewer_rows_than_packs_leave_no_pack_empty() -> None:
    # three packs of two ranks: one rank has one pass less
    shares = spread_packs(np.array([9, 9, 9]), 2, 10)
    assert sorted(map(len, shares)) == [1, 2]


def test_full_packs_hold_each_row_of_an_epoch_once() -> None:
    lengths = recipe_lengths(5000)
    plan = full(lengths, batch_size=2, world_size=4)
    first = int(plan.steps_per_epoch)
    assert Counter(trained(plan, range(first), 4)) == dict.fromkeys(range(5000), 1)
    second = next(n for n in range(first, 10 * first) if plan.epoch_of(n) == 2)
    assert Counter(trained(plan, range(first, second), 4)) == dict.fromkeys(range(5000), 1)
    for number in range(second):
        for rank in range(4):
            packs = plan.passes(number, rank)
            assert len(packs) == 2
            assert max(int(lengths[pack].sum()) for pack in packs) <= BUDGET
    assert trained(plan, range(first), 4) != trained(plan, range(first, second), 4)


def test_full_packs_are_full() -> None:
    lengths = recipe_lengths(36_592)
    plan = full(lengths)
    assert plan.efficiency >= 0.95
    packs = [pack for n in range(plan.steps_per_epoch) for rank in range(8) for pack in plan.passes(n, rank)]
    assert plan.efficiency == pytest.approx(lengths.sum() / (len(packs) * BUDGET))
    assert full(lengths, world_size=256).efficiency >= 0.95  # 255 splits at most
    # rows that no other joins
    assert full(np.full(512, 20_000)).efficiency == pytest.approx(20_000 / BUDGET)


def test_packs_at_the_end_are_split_until_their_number_divides() -> None:
    rng = np.random.default_rng(0)
    rows, lengths = np.arange(12), np.full(12, 10)
    packs = full_packs(rows, lengths, 30, rng=rng, multiple=7)
    assert len(packs) == 7
    assert sorted(map(len, packs)) == [1, 1, 1, 2, 2, 2, 3] or sum(map(len, packs)) == 12
    assert sorted(np.concatenate(packs).tolist()) == list(range(12))
    assert len(packs[0]) == 3  # the first is as it was packed
    with pytest.raises(ConfigurationError, match="an epoch of 12 rows makes no multiple of 13 packs"):
        full_packs(rows, lengths, 30, rng=rng, multiple=13)


def test_windows_are_packed_near_their_place() -> None:
    lengths = recipe_lengths(4000)
    packs = full_packs(np.arange(4000), lengths, BUDGET, rng=np.random.default_rng(0), window=1000)
    places = [float(np.median(pack)) for pack in packs]
    assert np.corrcoef(places, np.arange(len(places)))[0, 1] > 0.9
    assert any(a > b for a, b in pairwise(places))
    assert sum(int(lengths[pack].sum()) for pack in packs) / (len(packs) * BUDGET) > 0.98


def test_updates_of_packs_hold_the_stream_in_turn() -> None:
    lengths = recipe_lengths(640)
    plan = in_batches(lengths)
    assert plan.steps_per_epoch == 10
    stream = ShuffledRows(n_rows=640, seed=1)
    for number in (0, 3, 9, 10):
        epoch, place = divmod(number * 64, 640)
        assert sorted(trained(plan, range(number, number + 1), 8)) == sorted(
            stream.epoch(epoch)[place : place + 64].tolist()
        )
    assert [plan.epoch_of(n) for n in (0, 9, 10, 25)] == [0, 0, 1, 2]
    assert 0.6 < plan.efficiency < 1
    with pytest.raises(ConfigurationError, match="takes 641 distinct rows"):
        in_batches(lengths, batch_size=641)


def test_updates_do_not_depend_on_what_was_asked_before() -> None:
    lengths = recipe_lengths(300)
    mixture = MixedRows(source_ids=np.arange(300) % 3, weights=[1, 2, 1], seed=1)
    for make in (
        lambda: full(lengths, world_size=4),
        lambda: in_batches(lengths, batch_size=32, world_size=4),
        lambda: padded(lengths, world_size=4),
        lambda: FullPackPlan(mixture, lengths=lengths, batch_size=1, world_size=4, pack_tokens=BUDGET, seed=1),
    ):
        plan: Plan = make()
        last = int(3 * plan.steps_per_epoch)
        forward = [trained(plan, range(n, n + 1), 4) for n in range(last)]
        fresh: Plan = make()
        assert [trained(fresh, range(n, n + 1), 4) for n in reversed(range(last))] == forward[::-1]
        assert {fresh.epoch_of(n) for n in range(last)} >= {0, 1, 2}


def test_passes_of_padded_rows_keep_their_limits() -> None:
    lengths = np.array([2, 3, 3, 8, 9])
    rows = np.arange(5)

    def cut(micro_batch: int | None, max_tokens: int | None) -> list[list[int]]:
        passes = padded_passes(rows, lengths, micro_batch=micro_batch, max_tokens=max_tokens)
        return [one.tolist() for one in passes]

    assert cut(None, None) == [[0, 1, 2, 3, 4]]
    assert cut(2, None) == [[0, 1], [2, 3], [4]]
    assert cut(None, 9) == [[0, 1, 2], [3], [4]]
    assert cut(2, 18) == [[0, 1], [2, 3], [4]]
    assert cut(None, 1) == [[0], [1], [2], [3], [4]]  # a row that is longer is alone
    # where two epochs meet in a batch, a shorter row may follow a longer
    assert [one.tolist() for one in padded_passes(np.array([4, 0, 1]), lengths, micro_batch=None, max_tokens=18)] == [
        [4, 0],
        [1],
    ]


def test_padding_is_what_efficiency_lacks() -> None:
    lengths = np.array([10, 20, 10, 20])
    plan = padded(lengths, batch_size=4, world_size=1)
    assert plan.efficiency == 60 / 80
    assert padded(lengths, batch_size=4, world_size=1, micro_batch=2).efficiency == 1
    assert padded(lengths, batch_size=4, world_size=1).steps_per_epoch == 1
