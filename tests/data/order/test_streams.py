from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensearch_lightning.data.order.streams import (
    Chunks,
    MixedRows,
    ShuffledRows,
    apportion,
    interleave,
    row_stream,
    rows_at,
)
from opensearch_lightning.errors import ConfigurationError

OF_ROW = np.repeat(np.arange(10), [7, 3, 9, 5, 5, 1, 8, 4, 6, 2])


def test_near_order_reads_few_chunks_at_a_time() -> None:
    stream = ShuffledRows(n_rows=50, seed=1, chunks=Chunks(of_row=OF_ROW, window=3))
    epochs = [stream.epoch(e).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for epoch in epochs:
        chunks = OF_ROW[epoch].tolist()
        seen = list(dict.fromkeys(chunks))
        windows = [set(seen[i : i + 3]) for i in range(0, 10, 3)]
        ends = np.cumsum([sum(chunks.count(c) for c in window) for window in windows])
        for window, start, end in zip(windows, [0, *ends[:-1]], ends, strict=True):
            assert set(chunks[start:end]) == window
    # rows of a window are mixed, and chunks are not taken in their order
    assert OF_ROW[epochs[0]].tolist() != sorted(OF_ROW[epochs[0]].tolist())
    assert sum(a != b for a, b in zip(OF_ROW[epochs[0]], OF_ROW[epochs[0]][1:], strict=False)) > 20
    whole = ShuffledRows(n_rows=50, seed=1, chunks=Chunks(of_row=OF_ROW, window=10)).epoch(0).tolist()
    assert sorted(whole) == list(range(50))


def test_epochs_are_functions_of_seed_and_number() -> None:
    def make(seed: int) -> list[ShuffledRows | MixedRows]:
        chunks = Chunks(of_row=OF_ROW, window=2)
        return [
            ShuffledRows(n_rows=50, seed=seed, chunks=chunks),
            MixedRows(source_ids=np.arange(50) % 3, weights=[1, 2, 0.5], seed=seed, chunks=chunks),
        ]

    for one, again, other in zip(make(7), make(7), make(8), strict=True):
        forward = [one.epoch(e).tolist() for e in range(5)]
        assert forward == [again.epoch(e).tolist() for e in reversed(range(5))][::-1]
        assert forward != [other.epoch(e).tolist() for e in range(5)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_every_beginning_has_the_quota_of_each(counts: list[int]) -> None:
    sequence = interleave(counts)
    total = sum(counts)
    for source, count in enumerate(counts):
        given_out = np.cumsum(sequence == source)
        quota = np.arange(1, total + 1) * count
        assert (given_out >= quota // total).all()
        assert (given_out <= -(-quota // total)).all()


def test_apportioned_numbers_sum_up() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(7, [0.5, 0, 0.25]) == [5, 0, 2]
    assert apportion(100, [3, 1]) == [75, 25]


def test_mixture_keeps_proportions_and_runs_through_each_source() -> None:
    source_ids = np.repeat([0, 1, 2], [60, 30, 10])
    stream = MixedRows(source_ids=source_ids, weights=[1, 1, 2], seed=3)
    assert stream.rows_per_epoch == 100
    rows = np.concatenate([stream.epoch(e) for e in range(6)])
    assert [Counter(source_ids[epoch].tolist()) for epoch in np.split(rows, 6)] == [{0: 25, 1: 25, 2: 50}] * 6
    for start in range(0, 600, 8):
        assert np.bincount(source_ids[rows[start : start + 8]], minlength=3).tolist()[2] in (3, 4, 5)
    for source, size in enumerate((60, 30, 10)):
        own = rows[source_ids[rows] == source]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size].tolist())) == size  # all of a source before one again
        if len(own) >= 2 * size:
            assert own[:size].tolist() != own[size : 2 * size].tolist()


def test_weight_0_leaves_a_source_out() -> None:
    source_ids = np.repeat([0, 1], [6, 4])
    stream = row_stream(source_ids=source_ids, sources=("a", "b"), weights={"a": 0, "b": 3}, seed=0)
    assert stream.rows_per_epoch == 4
    assert sorted(stream.epoch(5).tolist()) == [6, 7, 8, 9]


def test_without_weights_every_row_comes_once() -> None:
    stream = row_stream(source_ids=np.repeat([0, 1], [6, 4]), sources=("a", "b"), weights=None, seed=0)
    assert sorted(stream.epoch(1).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1, "b": 1, "c": 1}, "weights name c, but the sources are a, b"),
        ({"a": 1}, "weights lack b: give each source one, 0 leaves it out; the sources are a, b"),
        ({"a": 1, "b": -0.5}, r"0 or more, got \{'b': -0.5\}; the sources are a, b"),
        ({"a": 1, "b": float("nan")}, r"0 or more, got \{'b': nan\}"),
        ({"a": 0, "b": 0}, "all weights are 0: give one source more; the sources are a, b"),
    ],
)
def test_weights_that_fit_no_source_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        row_stream(source_ids=np.array([0, 1]), sources=("a", "b"), weights=weights, seed=0)


def test_weight_of_a_source_without_usable_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no usable row of b, whose weight is above 0"):
        row_stream(source_ids=np.array([0, 0]), sources=("a", "b"), weights={"a": 1, "b": 1}, seed=0)


def test_places_run_on_through_epochs() -> None:
    stream = ShuffledRows(n_rows=5, seed=0)
    rows, epochs = rows_at(stream, 3, 12)
    assert rows.tolist() == [*stream.epoch(0)[3:], *stream.epoch(1), *stream.epoch(2)[:2]]
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_no_window_of_chunks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk_window counts chunks; got 0"):
        Chunks(of_row=OF_ROW, window=0)


def test_weights_whose_sum_is_no_float_keep_their_proportions() -> None:
    assert apportion(30, [1e308, 1.5e308, 5e307]) == [10, 15, 5]


def test_a_weight_too_small_for_one_row_is_named() -> None:
    ids = np.repeat([0, 1], [24, 7])
    with pytest.raises(ConfigurationError, match=r"give b no row of an epoch of 31: raise its weight, or set it to 0"):
        row_stream(source_ids=ids, sources=["a", "b"], weights={"a": 0.999, "b": 0.001}, seed=1)
