"""Log-probabilities and gradients of packed batches against padded ones."""

from dataclasses import replace

import pytest
import torch

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import policy_logprobs
from tests.models.tiny import tiny_policy
from tests.packed import image, mixed, packed, padded, run

TEXT = [run(0, [6], [5]), run(1, [6], [3], [4]), run(2, [4], [7]), run(3, [9], [2])]
CASES = {
    "mixed": mixed(),
    "text": TEXT,
    "one": [mixed()[0]],
    "one group": [run(seed, [2, image(1), 3, image(2, 2, 2), 1], [3 + seed], [2]) for seed in range(4)],
    "groups of one": [run(seed, [2 + seed, image(seed), 1], [4]) for seed in range(3)],
}


def scored(model, batch, **options):
    """Log-probabilities, and the gradients of a sum in which each token has a weight of its own."""
    mask = batch.step_ids >= 0
    logprobs, entropy = policy_logprobs(model, batch, mask, **options)
    weights = torch.linspace(-1, 2, mask.numel(), dtype=logprobs.dtype).view(mask.shape)
    model.zero_grad()
    (weights * logprobs).sum().backward()
    return logprobs.detach(), entropy, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "of_gradients"),
    # the gradients of a model in float64 pass through norms that compute in float32
    [(torch.float32, 1e-5, 1e-5), (torch.float64, 1e-9, 1e-6)],
)
def test_packed_and_padded_are_the_same(name, dtype, tolerance, of_gradients):
    model, samples = tiny_policy().to(dtype), CASES[name]
    expected, expected_entropy, expected_gradients = scored(model, padded(samples), with_entropy=True)
    got, entropy, gradients = scored(model, packed(samples), with_entropy=True, chunk_size=7)
    assert (expected != 0).sum() == sum(int((sample.step_ids >= 0).sum()) for sample in samples)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=tolerance, rtol=0)
    for parameter, gradient in expected_gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[parameter], gradient, atol=of_gradients * scale, rtol=0)


def test_tokens_of_a_shared_prompt_are_scored_for_each_sample():
    model, samples = tiny_policy(), CASES["one group"]
    batch, wide = packed(samples), padded(samples)
    mask = batch.valid.clone()
    mask[:, 0] = False
    got, _ = policy_logprobs(model, batch, mask)
    expected, _ = policy_logprobs(model, wide, mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", ["mixed", "text"])
def test_gradient_checkpointing_changes_nothing(name):
    plain, saving = tiny_policy().train(), tiny_policy().train()
    saving.activation_checkpointing_enable()
    assert saving.model.language_model.layers[0].gradient_checkpointing
    batch = packed(CASES[name])
    expected, _, expected_gradients = scored(plain, batch)
    got, _, gradients = scored(saving, batch)
    assert got.equal(expected)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=1e-5)


def test_no_sample_hears_of_another():
    model, samples = tiny_policy().double(), mixed()
    batch = packed(samples)
    mask = batch.step_ids >= 0
    before, _ = policy_logprobs(model, batch, mask)
    for row, sample in enumerate(samples):
        place = (sample.step_ids == 0).nonzero()[0]
        others = [*range(row), *range(row + 1, len(samples))]
        changed = replace(sample, token_ids=sample.token_ids.index_fill(0, place, 299))
        after, _ = policy_logprobs(model, packed([*samples[:row], changed, *samples[row + 1 :]]), mask)
        assert after[others].equal(before[others])
        assert not after[row].equal(before[row])


def test_a_spoiled_token_spoils_its_own_sample_only():
    model, samples = tiny_policy(), mixed()
    private, row = 299, 3
    sample = samples[row]
    place = (sample.step_ids == 0).nonzero()[0]
    samples[row] = replace(sample, token_ids=sample.token_ids.index_fill(0, place, private))
    batch = packed(samples)
    mask = batch.step_ids >= 0
    before, _ = policy_logprobs(model, batch, mask)
    # tied to the output layer, which must stay clean: spoil what the embedding gives, not its weight
    model.model.language_model.embed_tokens.register_forward_hook(
        lambda _, inputs, output: output.masked_fill((inputs[0] == private)[..., None], torch.nan)
    )
    after, _ = policy_logprobs(model, batch, mask)
    assert after[row].isnan().any()
    others = [number for number in range(len(samples)) if number != row]
    assert after[others].equal(before[others])


def test_without_images_the_vision_tower_has_a_gradient_of_zero():
    model = tiny_policy()
    _, _, gradients = scored(model, packed(TEXT))
    vision = [gradient for name, gradient in gradients.items() if ".visual." in name]
    assert vision
    assert all((gradient == 0).all() for gradient in vision)


def test_a_padded_batch_is_read_as_before_after_a_packed_one():
    model, wide = tiny_policy(), padded(mixed())
    mask = wide.step_ids >= 0
    before, _ = policy_logprobs(model, wide, mask)
    policy_logprobs(model, packed(mixed()), mask)
    assert policy_logprobs(model, wide, mask)[0].equal(before)


@pytest.mark.parametrize("batch", [packed(TEXT), padded(TEXT)], ids=["packed", "padded"])
def test_what_has_no_log_probability(batch):
    model = tiny_policy()
    with pytest.raises(ConfigurationError, match="token 0"):
        policy_logprobs(model, batch, batch.valid)
    mask = torch.ones_like(batch.valid)
    mask[:, 0] = False
    with pytest.raises(ConfigurationError, match="padding"):
        policy_logprobs(model, batch, mask)


def test_another_attention_is_refused():
    model, batch = tiny_policy(attn_implementation="eager"), packed(TEXT)
    with pytest.raises(ConfigurationError, match="eager"):
        policy_logprobs(model, batch, batch.step_ids >= 0)
