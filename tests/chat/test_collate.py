import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import AssistantTurn, TokenizedSample, UserTurn, collate, mrope_positions
from opensearch_lightning.errors import DataError, RenderError
from tests.models.tiny import tiny_renderer

LAYOUT = {
    "pad_id": tiny_renderer().pad_id,
    "image_token_id": tiny_renderer().image_token_id,
    "merge_size": tiny_renderer().merge_size,
}


def sample(*parts):
    return tiny_renderer().conversation(None, [UserTurn(parts=parts), AssistantTurn(text="an answer")])


TEXT = sample("Which?")
ONE = sample(Image.new("RGB", (64, 64)), "Which town is it?")
TWO = sample(Image.new("RGB", (96, 32)), "or", Image.new("RGB", (32, 32), (9, 9, 9)), "?")


def test_rows_are_the_samples_padded_on_the_right():
    batch = collate([TEXT, ONE, TWO], **LAYOUT)
    longest = max(len(s.token_ids) for s in (TEXT, ONE, TWO))
    assert batch.input_ids.shape == batch.step_ids.shape == batch.valid.shape == (3, longest)
    assert batch.position_ids.shape == (3, 3, longest)
    for row, s in enumerate((TEXT, ONE, TWO)):
        n = len(s.token_ids)
        assert batch.input_ids[row, :n].equal(s.token_ids)
        assert batch.step_ids[row, :n].equal(s.step_ids)
        assert batch.valid[row].tolist() == [True] * n + [False] * (longest - n)
        assert (batch.input_ids[row, n:] == LAYOUT["pad_id"]).all()
        assert (batch.step_ids[row, n:] == -1).all()
        expected, _ = mrope_positions(
            s.token_ids,
            [image.grid_thw for image in s.images],
            image_token_id=LAYOUT["image_token_id"],
            merge_size=LAYOUT["merge_size"],
        )
        assert batch.position_ids[:, row, :n].equal(expected)


def test_images_are_joined_in_the_order_of_their_pads():
    batch = collate([TWO, TEXT, ONE], **LAYOUT)
    assert batch.pixel_values is not None
    assert batch.image_grid_thw is not None
    images = [*TWO.images, *ONE.images]
    assert batch.pixel_values.equal(torch.cat([image.pixel_values for image in images]))
    assert batch.image_grid_thw.tolist() == [list(image.grid_thw) for image in images]


def test_a_batch_of_text_has_no_images():
    batch = collate([TEXT, TEXT], **LAYOUT)
    assert batch.pixel_values is None
    assert batch.image_grid_thw is None


@pytest.mark.parametrize("samples", [[TEXT], [TEXT, TWO]])
def test_a_batch_moves_as_a_whole(samples):
    moved = collate(samples, **LAYOUT).to("meta")
    tensors = [value for value in vars(moved).values() if value is not None]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len(tensors) == (4 if samples == [TEXT] else 6)


def test_what_cannot_be_a_batch_is_refused():
    with pytest.raises(DataError, match="no sample"):
        collate([], **LAYOUT)
    short = TokenizedSample(token_ids=torch.arange(5), step_ids=torch.arange(4))
    with pytest.raises(DataError, match="sample 1 has 5 tokens but 4 step ids"):
        collate([TEXT, short], **LAYOUT)
    cut = TokenizedSample(token_ids=ONE.token_ids[:4], step_ids=ONE.step_ids[:4], images=ONE.images)
    with pytest.raises(RenderError, match="image pads for 1 images"):
        collate([cut], **LAYOUT)
