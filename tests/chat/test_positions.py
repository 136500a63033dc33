import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import AssistantTurn, ObservationTurn, Turn, UserTurn, mrope_positions
from opensearch_lightning.errors import RenderError
from tests.models.tiny import tiny_policy, tiny_renderer

SIZES = [[], [(96, 96)], [(32, 96), (96, 32)], [(64, 64), (32, 32), (128, 64)], [(32, 32)]]


def positions(ids, images, start=0):
    renderer = tiny_renderer()
    grids = [image.grid_thw for image in images]
    return mrope_positions(
        ids, grids, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size, start=start
    )


def conversation(sizes):
    pictures = [Image.new("RGB", size, (i, 0, 0)) for i, size in enumerate(sizes)]
    turns: list[Turn] = [
        UserTurn(parts=[*pictures[:2], "Which?"]),
        AssistantTurn(text="a"),
        ObservationTurn(parts=["b", *pictures[2:]]),
    ]
    return tiny_renderer().conversation("Be short.", turns)


@pytest.mark.parametrize("sizes", SIZES)
def test_whole_sequences_equal_the_models_own_positions(sizes):
    sample = conversation(sizes)
    got, end = positions(sample.token_ids, sample.images)
    expected, delta = tiny_policy().model.get_rope_index(
        sample.token_ids[None],
        mm_token_type_ids=(sample.token_ids == tiny_renderer().image_token_id).int()[None],
        image_grid_thw=torch.tensor([image.grid_thw for image in sample.images]) if sample.images else None,
    )
    assert got.equal(expected[:, 0])
    assert end == len(sample.token_ids) + delta.item()


@pytest.mark.parametrize("sizes", SIZES)
def test_pieces_equal_the_whole(sizes):
    sample = conversation(sizes)
    whole, end = positions(sample.token_ids, sample.images)
    is_pad = sample.token_ids == tiny_renderer().image_token_id
    starts = is_pad & ~is_pad.roll(1)
    for cut in range(1, len(is_pad)):
        if is_pad[cut] and not starts[cut]:
            continue
        n_images = int(starts[:cut].sum())
        head, middle = positions(sample.token_ids[:cut], sample.images[:n_images])
        tail, last = positions(sample.token_ids[cut:].tolist(), sample.images[n_images:], start=middle)
        assert torch.cat([head, tail], 1).equal(whole)
        assert last == end


def test_images_are_not_numbered_like_text():
    sample = conversation([(96, 64)])
    got, end = positions(sample.token_ids, sample.images)
    image = got[:, sample.token_ids == tiny_renderer().image_token_id]
    first = image[0, 0].item()
    assert image.tolist() == [[first] * 6, [first + i for i in (0, 0, 0, 1, 1, 1)], [first + i for i in (0, 1, 2) * 2]]
    assert end == len(sample.token_ids) - 6 + 3


def test_an_empty_piece_moves_nothing():
    got, end = positions([], [], start=17)
    assert got.shape == (3, 0)
    assert end == 17


def test_pads_that_are_not_those_of_the_images_are_refused():
    sample = conversation([(64, 64)])
    with pytest.raises(RenderError, match=r"4 image pads for 0 images"):
        positions(sample.token_ids, [])
    with pytest.raises(RenderError, match=r"3 image pads for 1 images of \[4\]"):
        positions(
            sample.token_ids[sample.token_ids.tolist().index(tiny_renderer().image_token_id) + 1 :], sample.images
        )
    pad = tiny_renderer().image_token_id
    with pytest.raises(RenderError, match="token 0 are not contiguous"):
        positions([pad, pad, 99, pad, pad], sample.images)
