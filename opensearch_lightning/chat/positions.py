"""Multimodal rotary positions (M-RoPE) of Qwen3-VL, whole or piece by piece.

Shapes: ``T`` tokens. Rows of the positions: time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opensearch_lightning.errors import RenderError


def mrope_positions(
    token_ids: Tensor | Sequence[int],
    grids: Sequence[tuple[int, int, int]],
    *,
    image_token_id: int,
    merge_size: int,
    start: int = 0,
) -> tuple[Tensor, int]:
    """Positions of a piece of a sequence that goes on from position ``start``.

    Text counts on by one in all rows. The tokens of an image stand at the next position, spread by row and column of
    the merged grid, and the text behind it goes on past the longer side. The pieces of a sequence, cut anywhere but
    inside an image, give together what ``Qwen3VLModel.get_rope_index`` gives for the whole.

    Args:
        token_ids: ``[T]`` with image pads expanded.
        grids: ``(t, h, w)`` in patches before merging, one for each image of the piece, in order.
        image_token_id: id of ``<|image_pad|>``.
        merge_size: side of the square of patches that makes one token.
        start: first position of the piece, 0 at the head of a sequence.

    Returns:
        Positions, int64 ``[3, T]``, and the first position behind the piece.

    Raises:
        RenderError: if the image pads are not those of the grids.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long)
    pads = (ids == image_token_id).nonzero().flatten()
    sizes = [t * (h // merge_size) * (w // merge_size) for t, h, w in grids]
    if len(pads) != sum(sizes):
        raise RenderError(
            f"{len(pads)} image pads for {len(sizes)} images of {sizes} tokens: each image needs exactly its own pads"
        )
    blocks: list[Tensor] = []
    position, done, n_seen = start, 0, 0
    for (t, h, w), size in zip(grids, sizes, strict=True):
        first = int(pads[n_seen])
        if int(pads[n_seen + size - 1]) != first + size - 1:
            raise RenderError(f"the {size} pads of the image at token {first} are not contiguous")
        blocks.append(_text_positions(first - done, position))
        position += first - done
        rows, columns = h // merge_size, w // merge_size
        blocks.append(_image_positions(t, rows, columns) + position)
        position += max(rows, columns)
        done, n_seen = first + size, n_seen + size
    blocks.append(_text_positions(len(ids) - done, position))
    return torch.cat(blocks, dim=1), position + len(ids) - done


def _text_positions(length: int, start: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, -1)


def _image_positions(frames: int, rows: int, columns: int) -> Tensor:
    axes = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack(axes).flatten(1)
