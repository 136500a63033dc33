"""Boxes of pages whose order is known, and what holds for any boxes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensearch_lightning.tools.reading_order import reading_order

TITLE, TABLE = (0, 0, 100, 10), (0, 100, 100, 120)
LEFT = [(0, 20, 45, 50), (0, 55, 45, 90)]
RIGHT = [(55, 20, 100, 35), (55, 40, 100, 60), (55, 65, 100, 90)]


def shuffled_order(boxes, seed=0, **options):
    """The boxes themselves in reading order, given in another one."""
    mixed = list(boxes)
    random.Random(seed).shuffle(mixed)
    titles = [mixed.index(box) for box in options.pop("titles", ())]
    return [mixed[index] for index in reading_order(mixed, titles=titles, **options)]


@pytest.mark.parametrize("seed", range(5))
def test_what_spans_the_columns_comes_where_it_stands(seed):
    below = [(0, 130, 45, 150), (55, 130, 100, 150)]
    page = [TITLE, *LEFT, *RIGHT, TABLE, *below]
    assert shuffled_order(page, seed) == page


def test_three_columns_and_two_below():
    three = [(x, y, x + 28, y + 8) for x in (0, 36, 72) for y in (0, 10, 20)]
    two = [(x, y, x + 46, y + 8) for x in (0, 54) for y in (40, 50)]
    assert shuffled_order([*three, *two]) == [*three, *two]


def test_one_column_from_top_to_bottom():
    page = [(i % 3, 10 * i, 60 + i, 10 * i + 8) for i in range(8)]
    assert shuffled_order(page) == page


def test_a_column_that_ends_early_and_one_that_goes_on():
    short, long = [(0, 0, 45, 20)], [(55, 0, 100, 20), (55, 25, 100, 60)]
    assert shuffled_order([*short, *long]) == [*short, *long]
    assert shuffled_order([long[0], *short]) == [*short, long[0]]


def test_a_narrow_title_at_the_foot_of_columns_begins_what_comes():
    heading, text = (0, 95, 30, 100), (0, 105, 100, 140)
    page = [*LEFT, *RIGHT, heading, text]
    assert shuffled_order(page, titles=[heading]) == page
    assert shuffled_order(page) == [*LEFT, heading, *RIGHT, text]


def test_what_stands_alone_above_columns_comes_before_them():
    date = (70, 10, 100, 15)
    assert shuffled_order([*LEFT, *RIGHT, date]) == [date, *LEFT, *RIGHT]


def test_a_wide_box_that_cuts_into_columns_is_read_after_them():
    left, right, foot = (0, 0, 45, 50), (55, 0, 100, 50), (-5, 45, 100, 60)
    assert shuffled_order([foot, left, right]) == [left, right, foot]


def test_a_title_inside_a_column_stays_there():
    heading = (0, 51, 30, 54)
    page = [LEFT[0], heading, LEFT[1], *RIGHT]
    assert shuffled_order(page, titles=[heading]) == page


def test_columns_in_a_column():
    inner = [(55, 40, 75, 60), (80, 40, 100, 60)]
    page = [*LEFT, RIGHT[0], *inner, RIGHT[2]]
    assert shuffled_order(page) == page


def test_boxes_that_overlap_a_little():
    left, right = [(0, 0, 52, 22), (0, 20, 52, 42)], [(50, 0, 100, 22), (50, 20, 100, 42)]
    assert shuffled_order([*left, *right], tolerance=3) == [*left, *right]
    assert shuffled_order([*left, *right], tolerance=0) == [left[0], right[0], left[1], right[1]]


def test_nested_boxes_and_few():
    assert reading_order([]) == []
    assert reading_order([(0, 0, 1, 1)]) == [0]
    assert reading_order([(10, 10, 20, 20), (0, 0, 100, 100)]) == [1, 0]
    assert sorted(reading_order([(0, 0, 5, 5)] * 3)) == [0, 1, 2]


sides = st.tuples(*[st.integers(0, 60)] * 4)
any_boxes = st.lists(sides.map(lambda s: (min(s[0], s[2]), min(s[1], s[3]), max(s[0], s[2]), max(s[1], s[3]))))


@given(boxes=any_boxes, titles=st.sets(st.integers(0, 20)), tolerance=st.integers(0, 20))
def test_each_box_once(boxes, titles, tolerance):
    order = reading_order(boxes, titles=titles, tolerance=tolerance)
    assert sorted(order) == list(range(len(boxes)))


@given(boxes=any_boxes, x=st.integers(-50, 50), y=st.integers(-50, 50), scale=st.integers(1, 5))
def test_neither_place_nor_size_of_the_page_counts(boxes, x, y, scale):
    moved = [(scale * a + x, scale * b + y, scale * c + x, scale * d + y) for a, b, c, d in boxes]
    assert reading_order(moved) == reading_order(boxes)


@given(
    columns=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    spanning=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_columns_of_any_heights(columns, spanning, seed):
    """Paragraphs of random heights in full columns, under a title that spans them."""
    page = [(0, 0, 50 * len(columns) - 10, 5)] if spanning else []
    lowest = max(map(sum, columns))
    for number, heights in enumerate(columns):
        y = 10
        for i, height in enumerate(heights):
            last = i == len(heights) - 1
            bottom = 10 + lowest + len(columns) * 10 if last else y + height
            page.append((50 * number, y, 50 * number + 40, bottom))
            y += height + 1
    assert shuffled_order(page, seed) == page
