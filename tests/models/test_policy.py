import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import AssistantTurn, ObservationTurn, UserTurn, collate, format_action
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import forbidden_token_ids, policy_logprobs
from tests.models.tiny import tiny_policy, tiny_processor, tiny_renderer


def sample(question, *pictures, answer="a heron"):
    return tiny_renderer().conversation(
        "Be short.",
        [
            UserTurn(parts=[*pictures[:1], question]),
            AssistantTurn(text=format_action("I cut.", call=("crop", {"image": "img_1"}))),
            ObservationTurn(parts=["Here.", *pictures[1:]]),
            AssistantTurn(text=format_action("So.", response=answer)),
        ],
    )


def noise(seed, width, height):
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


TEXT = sample("Which animal is the emblem of the town of Velmora?", answer="no picture, no answer")
ONE = sample("Which animal?", noise(0, 64, 96))
TWO = sample("Which?", noise(1, 96, 32), noise(2, 32, 32))


def batch_of(*samples):
    renderer = tiny_renderer()
    return collate(
        samples, pad_id=renderer.pad_id, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size
    )


def naive(model, one, temperature=1.0):
    """Log-probabilities and entropies of a sequence by the model's own forward pass, with its own positions."""
    grids = [image.grid_thw for image in one.images]
    logits = model(
        input_ids=one.token_ids[None],
        mm_token_type_ids=(one.token_ids == tiny_renderer().image_token_id).int()[None],
        pixel_values=torch.cat([image.pixel_values for image in one.images]) if grids else None,
        image_grid_thw=torch.tensor(grids) if grids else None,
        use_cache=False,
    ).logits[0]
    logits = logits.index_fill(-1, torch.tensor(forbidden_token_ids(model.config)), -torch.inf)
    distribution = torch.log_softmax(logits[:-1] / temperature, -1)
    logprobs = distribution.gather(-1, one.token_ids[1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).nansum(-1)
    mask = one.step_ids[1:] >= 0
    zeros = torch.zeros(1)
    return tuple(torch.cat([zeros, torch.where(mask, values, 0.0)]) for values in (logprobs, entropy))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_padded_batch_with_images_equals_each_sequence_alone(temperature):
    model = tiny_policy()
    batch = batch_of(TWO, TEXT, ONE)
    got, entropy = policy_logprobs(
        model, batch, batch.step_ids >= 0, temperature=temperature, with_entropy=True, chunk_size=7
    )
    assert entropy is not None
    for row, one in enumerate((TWO, TEXT, ONE)):
        n = len(one.token_ids)
        expected, expected_entropy = naive(model, one, temperature)
        torch.testing.assert_close(got[row, :n], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[row, :n], expected_entropy, atol=1e-5, rtol=0)
        assert (got[row, n:] == 0).all()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunk_size", [5, 1024])
def test_gradients_equal_those_of_the_models_own_forward_pass(chunk_size):
    model = tiny_policy().double()
    batch = batch_of(TWO, ONE)
    got, _ = policy_logprobs(model, batch, batch.step_ids >= 0, chunk_size=chunk_size)
    expected = sum(naive(model, one)[0].sum() for one in (TWO, ONE))
    torch.testing.assert_close(got.sum(), expected)
    torch.testing.assert_close(gradients(model, got.sum()), gradients(model, expected))


def test_only_the_tokens_of_the_mask_are_scored():
    model, batch = tiny_policy(), batch_of(ONE, TEXT)
    everything, _ = policy_logprobs(model, batch, batch.step_ids >= 0)
    some, entropy = policy_logprobs(model, batch, batch.step_ids == 1)
    assert entropy is None
    torch.testing.assert_close(some, torch.where(batch.step_ids == 1, everything, 0.0))
    assert (some != 0).sum() == (batch.step_ids == 1).sum()


@pytest.mark.parametrize("samples", [(TEXT,), (TEXT, sample("Who?"))])
def test_text_alone_gives_the_vision_tower_a_gradient_of_zero(samples):
    model, batch = tiny_policy(), batch_of(*samples)
    got, _ = policy_logprobs(model, batch, batch.step_ids >= 0)
    expected, _ = naive(model, samples[0])
    torch.testing.assert_close(got[0, : len(expected)], expected, atol=1e-5, rtol=0)
    got.sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    vision = [parameter.grad for name, parameter in model.named_parameters() if ".visual." in name]
    assert vision
    assert all((gradient == 0).all() for gradient in vision)


def test_a_frozen_vision_tower_needs_no_gradient():
    model, batch = tiny_policy(train_vision=False), batch_of(TEXT)
    policy_logprobs(model, batch, batch.step_ids >= 0)[0].sum().backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if ".visual." in name)


def test_nothing_to_score_reaches_every_parameter():
    model, batch = tiny_policy(), batch_of(ONE)
    got, _ = policy_logprobs(model, batch, batch.step_ids > 99)
    assert (got == 0).all()
    got.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_other_images_give_other_values():
    model = tiny_policy()
    other = sample("Which animal?", noise(9, 64, 96))
    batch, changed = batch_of(ONE), batch_of(other)
    assert batch.input_ids.equal(changed.input_ids)
    mask = batch.step_ids >= 0
    assert not policy_logprobs(model, batch, mask)[0].equal(policy_logprobs(model, changed, mask)[0])


def test_half_precision_weights_give_float32():
    model, batch = tiny_policy(dtype="bfloat16"), batch_of(ONE, TEXT)
    got, _ = policy_logprobs(model, batch, batch.step_ids >= 0)
    assert got.dtype == torch.float32
    expected, _ = policy_logprobs(tiny_policy(), batch, batch.step_ids >= 0)
    torch.testing.assert_close(got, expected, atol=0.2, rtol=0)


def test_a_policy_gives_no_chance_to_the_tokens_of_an_image():
    forbidden = forbidden_token_ids(tiny_policy().config)
    names = tiny_processor().tokenizer.convert_ids_to_tokens(list(forbidden))
    assert sorted(names) == ["<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<|vision_start|>"]
    batch = batch_of(ONE)
    is_pad = batch.input_ids == tiny_renderer().image_token_id
    got, _ = policy_logprobs(tiny_policy(), batch, is_pad)
    assert (got[is_pad] < -1e30).all()


def test_the_first_token_cannot_be_scored():
    batch = batch_of(TEXT)
    with pytest.raises(ConfigurationError, match="token 0"):
        policy_logprobs(tiny_policy(), batch, batch.valid)


def test_a_tiny_policy_learns():
    model, batch = tiny_policy(), batch_of(ONE, TEXT, TWO)
    mask = batch.step_ids >= 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = -policy_logprobs(model, batch, mask)[0].sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_generation_from_the_processors_inputs_agrees():
    """The policy as vLLM or `generate` would be asked: processor in, tokens out, scored the same."""
    model, processor = tiny_policy(), tiny_processor()
    prompt = tiny_renderer().prompt("Be short.", [noise(0, 64, 96), "Which animal?"])
    conversation = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "image", "image": noise(0, 64, 96)}, {"type": "text", "text": "Which animal?"}],
        },
    ]
    inputs = processor.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    assert inputs["input_ids"][0].tolist() == prompt.token_ids
    made = model.generate(
        **inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, min_new_tokens=6
    )
    n = len(prompt.token_ids)
    steps = torch.where(torch.arange(n + 6) < n, -1, 0)
    batch = batch_of(type(ONE)(token_ids=made.sequences[0], step_ids=steps, images=prompt.images))
    got, _ = policy_logprobs(model, batch, batch.step_ids >= 0)
    logits = torch.cat(made.logits).index_fill(-1, torch.tensor(forbidden_token_ids(model.config)), -torch.inf)
    expected = torch.log_softmax(logits, -1).gather(-1, made.sequences[0, n:, None])[:, 0]
    torch.testing.assert_close(got[0, n:], expected, atol=1e-5, rtol=0)
