from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from opensearch_lightning.data import EpochOrder, LengthOrder
from opensearch_lightning.errors import ConfigurationError


def test_epoch_batches_hold_distinct_rows_of_one_permutation() -> None:
    order = EpochOrder(n_rows=10, batch_size=3, seed=1)
    epochs = [np.concatenate([order.batch(e * 3 + i) for i in range(3)]).tolist() for e in range(4)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # the row that is left out changes
    assert len({row for epoch in epochs for row in set(range(10)) - set(epoch)}) > 1


def test_order_is_a_function_of_seed_and_number() -> None:
    lengths = np.arange(40)
    orders: list[Callable[[int], EpochOrder | LengthOrder]] = [
        lambda seed: EpochOrder(n_rows=40, batch_size=4, seed=seed),
        lambda seed: LengthOrder(lengths=lengths, batch_size=4, seed=seed, window=3),
    ]
    for make in orders:
        forward = [make(7).batch(i).tolist() for i in range(30)]
        order = make(7)
        backward = [order.batch(i).tolist() for i in reversed(range(30))]
        assert forward == backward[::-1]
        assert forward != [make(8).batch(i).tolist() for i in range(30)]


@pytest.mark.parametrize(("n_rows", "batch_size", "window"), [(40, 4, 3), (41, 4, 64), (7, 7, 2), (50, 8, 1)])
def test_every_row_comes_once_an_epoch(n_rows: int, batch_size: int, window: int) -> None:
    lengths = np.random.default_rng(0).integers(5, 50, n_rows)
    order = LengthOrder(lengths=lengths, batch_size=batch_size, seed=3, window=window)
    windows = min(window, n_rows // batch_size)  # so many batches hold whole windows and whole epochs
    counts = Counter(int(row) for i in range(n_rows * windows) for row in order.batch(i))
    assert counts == dict.fromkeys(range(n_rows), windows * batch_size)


def test_rows_of_a_batch_have_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 640)

    def padding(window: int) -> float:
        order = LengthOrder(lengths=lengths, batch_size=16, seed=0, window=window)
        batches = [lengths[order.batch(i)] for i in range(40)]
        return 1 - sum(batch.sum() for batch in batches) / sum(batch.max() * 16 for batch in batches)

    assert padding(1) > 0.4
    assert padding(40) < 0.05


def test_batches_are_not_sorted_among_themselves() -> None:
    lengths = np.arange(640)
    order = LengthOrder(lengths=lengths, batch_size=16, seed=0, window=40)
    firsts = [int(order.batch(i)[0]) for i in range(40)]
    assert firsts != sorted(firsts)
    assert sorted(firsts) == list(range(0, 640, 16))


def test_rows_do_not_meet_themselves() -> None:
    # epochs of 21 rows and windows of 5 batches of 4 do not fall together
    order = LengthOrder(lengths=np.random.default_rng(1).permutation(21), batch_size=4, seed=0)
    doubled = [i for i in range(2000) if len(set(order.batch(i).tolist())) < 4]
    assert len(doubled) < 0.02 * 2000


@pytest.mark.parametrize("batch_size", [0, 6])
def test_batches_larger_than_the_data_are_refused(batch_size: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"takes {batch_size} distinct rows of 5.*; set it in \[1, 5\]"):
        EpochOrder(n_rows=5, batch_size=batch_size, seed=0)
    with pytest.raises(ConfigurationError, match="set it in"):
        LengthOrder(lengths=np.arange(5), batch_size=batch_size, seed=0)
    with pytest.raises(ConfigurationError, match="window"):
        LengthOrder(lengths=np.arange(5), batch_size=2, seed=0, window=0)
