"""The first layer of the vision tower as the matrix product that it is.

Shapes: ``P`` patches of ``C`` channels, ``t`` frames and ``h × w`` pixels, ``D`` values of an embedding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear


class PatchProjection(nn.Conv3d):
    """A convolution that sees each input whole: one product with its weight as a matrix.

    Kernels made for convolutions take longer for it, above all backward. Weight and bias are those of ``layer``.

    Args:
        layer: a convolution whose kernel is as large as its inputs.
    """

    def __init__(self, layer: nn.Conv3d) -> None:
        kernel: Any = layer.kernel_size
        super().__init__(layer.in_channels, layer.out_channels, kernel, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, patches: Tensor) -> Tensor:
        """``[P, C, t, h, w]`` to ``[P, D, 1, 1, 1]``."""
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def project_by_matrix(policy: Any) -> None:
    """Let the vision tower of a ``Qwen3VLForConditionalGeneration`` embed its patches by :class:`PatchProjection`."""
    embedding = policy.model.visual.patch_embed
    embedding.proj = PatchProjection(embedding.proj)
