"""Patches embedded by a matrix product against the convolution of transformers."""

import torch
from torch import nn

from opensearch_lightning.models.patch_embedding import PatchProjection
from tests.models.tiny import tiny_policy


def test_product_is_the_convolution_in_values_and_gradients() -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 8, (2, 16, 16), stride=(2, 16, 16)).double()
    product = PatchProjection(conv)
    patches = torch.randn(5, 3, 2, 16, 16, dtype=torch.float64)
    results = []
    for layer in (conv, product):
        inputs = patches.clone().requires_grad_(True)
        conv.zero_grad()
        output = layer(inputs)
        output.square().sum().backward()
        results.append([output, inputs.grad, conv.weight.grad.clone(), conv.bias.grad.clone()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_policies_embed_by_products_under_the_names_of_the_checkpoint() -> None:
    policy = tiny_policy()
    projection = policy.model.visual.patch_embed.proj
    assert type(projection) is PatchProjection
    named = dict(policy.named_parameters())
    assert named["model.visual.patch_embed.proj.weight"] is projection.weight
    assert named["model.visual.patch_embed.proj.bias"] is projection.bias
    assert not projection.weight.is_meta
