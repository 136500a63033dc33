import torch

from opensearch_lightning.rollout.slot_cache import SlotCache

CPU = torch.device("cpu")


def states(*values: float, width: int = 1) -> torch.Tensor:
    """Keys ``[N, 1, width, 2]`` that hold one value each."""
    return torch.tensor(values)[:, None, None, None].expand(len(values), 1, width, 2)


def test_rows_write_at_their_own_ends_and_see_their_own_past() -> None:
    cache = SlotCache(n_slots=4, max_length=64)
    cache.window([2, 0], [0, 0], [3, 1], CPU)
    cache.update(states(1.0, 2.0, width=3), states(1.0, 2.0, width=3), 0)
    # slot 2 holds three tokens, slot 0 one: the padding behind it was not written
    mask = cache.window([0, 2], [1, 3], [2, 1], CPU)
    keys, _ = cache.update(states(5.0, 6.0, width=2), states(5.0, 6.0, width=2), 0)
    assert keys[:, 0, :, 0].tolist() == [[2, 0, 0, 5, 5], [1, 1, 1, 6, 6]]
    assert mask[:, 0].tolist() == [
        [[True, False, False, True, False], [True, False, False, True, True]],
        [[True, True, True, True, False], [True, True, True, True, True]],
    ]


def test_decoding_rows_read_views_of_their_slots() -> None:
    cache = SlotCache(n_slots=3, max_length=64)
    cache.window([0, 1], [0, 0], [2, 2], CPU)
    cache.update(states(1.0, 2.0, width=2), states(1.0, 2.0, width=2), 0)
    mask = cache.window([0, 1], [2, 2], [1, 1], CPU)
    keys, values = cache.update(states(3.0, 4.0), states(3.0, 4.0), 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 3], [2, 2, 4]]
    assert values.data_ptr() == cache._values[0].data_ptr()
    assert mask.all()


def test_a_prompt_as_long_as_the_cache_is_shared() -> None:
    cache = SlotCache(n_slots=3, max_length=300)
    cache.window([0], [0], [300], CPU)
    cache.update(states(7.0, width=300), states(7.0, width=300), 0)
    cache.copy(0, [1, 2], 300)
    assert (cache._keys[0] == 7).all()


def test_swapping_and_growing_keep_what_rows_hold() -> None:
    cache = SlotCache(n_slots=2, max_length=1000)
    cache.window([0, 1], [0, 0], [2, 1], CPU)
    cache.update(states(1.0, 2.0, width=2), states(1.0, 2.0, width=2), 0)
    cache.swap(0, 1, 2)
    cache.window([1], [2], [400], CPU)
    keys, _ = cache.update(states(9.0, width=400), states(9.0, width=400), 0)
    assert keys[0, 0, :3, 0].tolist() == [1, 1, 9]
    cache.clear()
    assert not cache._keys
