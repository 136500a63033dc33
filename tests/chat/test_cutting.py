import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opensearch_lightning.chat import (
    AssistantTurn,
    ObservationTurn,
    TokenizedSample,
    UserTurn,
    cut_at_turn,
)
from opensearch_lightning.errors import ConfigurationError, RenderError
from opensearch_lightning.types import ImageInput
from tests.data.rows import SYSTEM, answer, call, picture
from tests.models.tiny import tiny_renderer

PAD = 9


def image(number: int, tokens: int) -> ImageInput:
    """An image of so many tokens, whose patches hold its number."""
    pixels = torch.full((4 * tokens, 3), float(number))
    return ImageInput(name=f"img_{number}", encoded=b"", pixel_values=pixels, grid_thw=(1, 2, 2 * tokens))


def sample(*spans: tuple[int, int], images: tuple[ImageInput, ...] = (), pads: tuple[int, ...] = ()) -> TokenizedSample:
    """Spans of (tokens, step); ``pads`` are the spans whose tokens are image pads."""
    ids = [PAD if number in pads else 1 for number, (length, _) in enumerate(spans) for _ in range(length)]
    steps = [step for length, step in spans for _ in range(length)]
    return TokenizedSample(token_ids=torch.tensor(ids), step_ids=torch.tensor(steps), images=images)


def cut(one: TokenizedSample, limit: int) -> TokenizedSample | None:
    return cut_at_turn(one, limit, image_token_id=PAD, merge_size=2)


def test_second_image_goes_with_its_tokens_and_pixels() -> None:
    whole = sample((300, -1), (20, 0), (1, -1), (300, -1), (20, 1), images=(image(1, 300), image(2, 300)), pads=(0, 3))
    short = cut(whole, 400)
    assert short is not None
    assert len(short.token_ids) == 320
    assert short.step_ids[-20:].tolist() == [0] * 20
    assert [one.name for one in short.images] == ["img_1"]
    assert int((short.token_ids == PAD).sum()) == 300 == sum(one.pixel_values.shape[0] for one in short.images) // 4
    assert cut(whole, 641) is whole


@pytest.mark.parametrize(("limit", "kept"), [(29, 25), (25, 25), (24, 10), (10, 10), (9, None)])
def test_longest_beginning_of_whole_turns_is_kept(limit: int, kept: int | None) -> None:
    short = cut(sample((5, -1), (5, 0), (10, -1), (5, 1), (3, -1), (2, 2)), limit)
    assert (None if short is None else len(short.token_ids)) == kept


def test_turns_side_by_side_are_two() -> None:
    short = cut(sample((2, -1), (3, 0), (3, 1)), 6)
    assert short is not None
    assert short.step_ids.tolist() == [-1, -1, 0, 0, 0]


def test_beginning_is_the_rendering_of_the_first_turns() -> None:
    renderer = tiny_renderer()
    turns = [
        UserTurn(parts=[picture(1, 96), "Which town?"]),
        AssistantTurn(text=call("a")),
        ObservationTurn(parts=["seen", picture(2, 128)]),
        AssistantTurn(text=call("b")),
        ObservationTurn(parts=["more", picture(3, 64)]),
        AssistantTurn(text=answer("c")),
    ]
    options = {"image_token_id": renderer.image_token_id, "merge_size": renderer.merge_size}
    whole = renderer.conversation(SYSTEM, turns)
    for n_turns in (2, 4):
        expected = renderer.conversation(SYSTEM, turns[:n_turns])
        limit = len(expected.token_ids)
        short = cut_at_turn(whole, limit, **options)
        assert short is not None
        # the newline behind the last turn is not kept
        assert short.token_ids.tolist() == expected.token_ids[:-1].tolist()
        assert short.step_ids.tolist() == expected.step_ids[:-1].tolist()
        assert [one.encoded for one in short.images] == [one.encoded for one in expected.images]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 60))
def test_image_tokens_are_those_of_the_images(turns: list[tuple[int, int]], limit: int) -> None:
    spans, pads, images = [], [], []
    for step, (said, pictured) in enumerate(turns):
        if pictured:
            pads.append(len(spans))
            images.append(image(step, pictured))
            spans.append((pictured, -1))
        spans += [(said, step), (1, -1)]
    short = cut(sample(*spans, images=tuple(images), pads=tuple(pads)), limit)
    if short is None:
        assert turns[0][0] + turns[0][1] > limit
        return
    assert len(short.token_ids) <= limit
    assert int((short.token_ids == PAD).sum()) == sum(one.grid_thw[1] * one.grid_thw[2] // 4 for one in short.images)
    assert int(short.step_ids[-1 if short.step_ids[-1] >= 0 else -2]) >= 0


def test_wrong_limits_and_split_images_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_tokens=0"):
        cut(sample((2, 0)), 0)
    with pytest.raises(RenderError, match=r"3 image tokens before token 5 are no whole images of \[4\] tokens"):
        cut(sample((3, -1), (2, 0), (1, -1), (2, 1), images=(image(1, 4),), pads=(0, 2)), 5)
