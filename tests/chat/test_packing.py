"""Laying samples in one row, and planning which go together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensearch_lightning.chat import Segment, TokenizedSample, mrope_positions, plan_packs
from opensearch_lightning.chat.packing import UNEVEN
from opensearch_lightning.errors import ConfigurationError, DataError, RenderError
from tests.models.tiny import tiny_renderer
from tests.packed import MERGE, image, mixed, packed, padded, run


def places(batch, row):
    return batch.index_BT[row][batch.valid[row]]


def test_a_shared_prompt_lies_once_and_its_positions_go_on_behind_it():
    """By hand: a picture of 2 × 1 tokens in the prompt, one of 1 × 3 behind the first answer."""
    here, there = image(1, 4, 2), image(2, 2, 6)
    batch = packed([run(0, [1, here, 2], [2, there, 1]), run(1, [5], [2]), run(2, [1, here, 2], [3])])
    assert batch.segments == (
        Segment(start=0, length=5),
        Segment(start=5, length=6, parent=0),
        Segment(start=11, length=3, parent=0),
        Segment(start=14, length=7),
    )
    assert batch.position_ids[:, 0].tolist() == [
        # prompt: text, two rows of the picture, text; answer, the picture as one row, text; other answer; other sample
        [0, 1, 1, 3, 4, 5, 6, 7, 7, 7, 10, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 10, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert batch.index_BT.tolist() == [
        [*range(11)],
        [*range(14, 21), -1, -1, -1, -1],
        [0, 1, 2, 3, 4, 11, 12, 13, -1, -1, -1],
    ]
    assert batch.image_grid_thw is not None
    assert batch.image_grid_thw.tolist() == [[1, 4, 2], [1, 2, 6]]


def test_each_sample_is_read_from_the_row_as_from_a_padded_batch():
    samples = mixed()
    batch, wide = packed(samples), padded(samples)
    assert batch.step_ids.equal(wide.step_ids)
    assert batch.valid.equal(wide.valid)
    for row, sample in enumerate(samples):
        place = places(batch, row)
        assert batch.input_ids[0, place].equal(sample.token_ids)
        grids = [picture.grid_thw for picture in sample.images]
        expected, _ = mrope_positions(
            sample.token_ids, grids, image_token_id=tiny_renderer().image_token_id, merge_size=MERGE
        )
        assert batch.position_ids[:, 0, place].equal(expected)


def test_every_place_belongs_to_a_sample_and_shared_ones_to_several():
    samples = mixed()
    batch = packed(samples)
    n_readers = torch.zeros(batch.input_ids.shape[1], dtype=torch.long)
    for row in range(len(samples)):
        n_readers[places(batch, row)] += 1
    expected = torch.zeros_like(n_readers)
    children = [segment.parent for segment in batch.segments]
    for number, segment in enumerate(batch.segments):
        expected[segment.start : segment.start + segment.length] = max(1, children.count(number))
    assert n_readers.equal(expected)
    # prompts of 10, 7 and 9 tokens are shared by 3, 2 and 2 samples
    assert batch.input_ids.shape[1] == sum(len(sample.token_ids) for sample in samples) - 2 * 10 - 7 - 9


def test_images_are_listed_in_the_order_of_their_pads():
    samples = mixed()
    batch = packed(samples)
    pads = batch.input_ids[0] == tiny_renderer().image_token_id
    assert batch.pixel_values is not None
    # each image of a sample, found again through the places of its pads
    owner = torch.full(pads.shape, -1)
    owner[pads] = torch.arange(int(pads.sum()))
    tokens = batch.pixel_values.view(-1, MERGE**2, batch.pixel_values.shape[-1])
    for row, sample in enumerate(samples):
        own = owner[places(batch, row)]
        seen = tokens[own[own >= 0]].flatten(0, 1)
        expected = torch.cat([p.pixel_values for p in sample.images]) if sample.images else seen[:0]
        assert seen.equal(expected)


def shares(one, other):
    return any(segment.parent >= 0 for segment in packed([one, other]).segments)


def test_prompts_are_the_same_only_with_the_same_tokens_and_pictures():
    picture = image(1)
    one, other = run(0, [3, picture, 2], [4]), run(1, [3, picture, 2], [6])
    assert shares(one, other)
    changed = other.token_ids.clone()
    changed[0] += 1
    assert not shares(one, replace(other, token_ids=changed))
    assert not shares(one, replace(other, images=(replace(picture, encoded=b"another file"),)))
    patches = image(2).pixel_values
    assert not shares(one, replace(other, images=(replace(picture, pixel_values=patches),)))
    turned = replace(picture, grid_thw=(1, 2, 4))
    assert not shares(one, replace(other, images=(turned,)))
    # pictures behind the prompt are each sample's own
    assert shares(run(0, [3, picture, 2], [4, image(2), 1]), run(1, [3, picture, 2], [4, image(3), 1]))
    # the prompt of the other goes on for a token
    assert not shares(one, replace(other, step_ids=other.step_ids.index_fill(0, torch.tensor([7]), -1)))


def test_without_a_prompt_or_without_an_answer():
    bare = TokenizedSample(token_ids=torch.tensor([300, 301]), step_ids=torch.tensor([0, 0]), images=())
    batch = packed([bare, bare])
    assert batch.segments == (Segment(start=0, length=2), Segment(start=2, length=2))
    silent = replace(run(0, [4], [3]), token_ids=run(0, [4], [3]).token_ids[:4], step_ids=torch.full((4,), -1))
    batch = packed([silent, run(0, [4], [3]), silent])
    assert batch.segments == (Segment(start=0, length=4), Segment(start=4, length=3, parent=0))
    assert batch.index_BT.tolist() == [[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, -1, -1, -1]]


def test_what_cannot_be_packed():
    with pytest.raises(DataError, match="at least one"):
        packed([])
    sample = run(0, [3, image(1)], [4])
    with pytest.raises(DataError, match="sample 0 has 9 tokens but 8"):
        packed([replace(sample, step_ids=sample.step_ids[1:])])
    with pytest.raises(RenderError, match="2 image pads for 0 images"):
        packed([replace(sample, images=())])


def test_a_batch_moves_as_a_whole():
    batch = packed(mixed()).to("meta")
    tensors = (batch.input_ids, batch.position_ids, batch.index_BT, batch.step_ids, batch.valid, batch.pixel_values)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert len(batch.segments) == len(packed(mixed()).segments)


def plan(samples, max_tokens, **options):
    return plan_packs(samples, max_tokens, image_token_id=tiny_renderer().image_token_id, merge_size=MERGE, **options)


def load(samples, members):
    return packed([samples[number] for number in members]).input_ids.shape[1]


def group(prompt, *rests):
    """Samples whose prompt has ``prompt`` tokens, and no other group's."""
    return [run(seed + 50 * prompt, [prompt], [rest]) for seed, rest in enumerate(rests)]


def test_groups_stay_together_where_that_costs_nothing():
    samples = [*group(10, 5, 5, 5), *group(11, 5, 4, 5), *group(12, 4, 4, 5), *group(13, 4, 4, 4)]
    assert plan(samples, 50) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert plan(samples, 1000) == [[*range(12)]]


def test_a_group_above_the_budget_is_cut_evenly():
    samples = group(10, *[20] * 8)
    packs = plan(samples, 100)
    assert [len(members) for members in packs] == [4, 4]
    assert [load(samples, members) for members in packs] == [90, 90]


def test_a_group_is_cut_rather_than_leave_one_pack_nearly_empty():
    samples = [*group(10, *[10] * 8), *group(5, 10)]
    # whole: 90 and 15 tokens
    assert [load(samples, members) for members in plan(samples, 100)] == [65, 50]


def test_a_sample_above_the_budget_is_alone():
    samples = [*group(10, 5, 200, 5), *group(6, 300)]
    assert plan(samples, 100) == [[3], [1], [0, 2]]


def test_at_least_so_many_packs():
    samples = group(10, *[10] * 6)
    assert [len(members) for members in plan(samples, 1000, at_least=3)] == [2, 2, 2]
    assert plan(samples, 1000, at_least=6) == [[0], [1], [2], [3], [4], [5]]
    assert len(plan(samples, 1000, at_least=9)) == 6
    assert plan([], 1000, at_least=2) == []
    # samples without an answer are nothing but their prompt, and still one a pack
    silent = [replace(sample, step_ids=torch.full((20,), -1)) for sample in group(10, *[10] * 3)]
    assert plan([silent[0]] * 3, 1000, at_least=3) == [[0], [1], [2]]


@pytest.mark.parametrize(("max_tokens", "at_least"), [(0, 1), (10, 0)])
def test_a_plan_needs_positive_limits(max_tokens, at_least):
    with pytest.raises(ConfigurationError, match=f"max_tokens={max_tokens} and at_least={at_least}"):
        plan(group(3, 4), max_tokens, at_least=at_least)


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(8, 120), st.integers(1, 6), st.randoms(use_true_random=False))
def test_plans_hold_their_limits(groups, max_tokens, at_least, random):
    samples = [
        run(1000 * number + seed, [prompt, image(number, 2, 2)], [rest])
        for number, (prompt, rests) in enumerate(groups)
        for seed, rest in enumerate(rests)
    ]
    random.shuffle(samples)
    packs = plan(samples, max_tokens, at_least=at_least)
    assert packs == plan(samples, max_tokens, at_least=at_least)
    assert sorted(number for members in packs for number in members) == [*range(len(samples))]
    assert all(members == sorted(members) and members for members in packs)
    assert len(packs) >= min(at_least, len(samples))
    loads = [load(samples, members) for members in packs]
    assert loads == sorted(loads, reverse=True)
    for members, tokens in zip(packs, loads, strict=True):
        assert tokens <= max_tokens or len(members) == 1
    lengths = [len(sample.token_ids) for sample in samples]
    longest, total, n_packs = max(lengths), sum(lengths), len(packs)
    if longest <= max_tokens:
        # few: the samples, one by one, would have filled one pack less up to the longest of them
        assert n_packs <= at_least or (n_packs - 1) * (max_tokens - longest) < total
        # even: the fullest is above the mean by the tolerance and one sample at most
        assert loads[0] <= UNEVEN * total / n_packs + longest
