"""From token sequences to one padded batch for the model.

Shapes: ``B`` sequences, ``T`` tokens of the longest, ``P`` image patches of all images, ``D`` values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from opensearch_lightning.chat.positions import mrope_positions
from opensearch_lightning.errors import DataError
from opensearch_lightning.types import ImageInput

Record = TypeVar("Record")


class TokenSequence(Protocol):
    """What is collated: a :class:`~opensearch_lightning.chat.TokenizedSample`, a trajectory, or the like."""

    @property
    def token_ids(self) -> Tensor:
        """``[T]`` int64 with image pads expanded."""

    @property
    def step_ids(self) -> Tensor:
        """``[T]`` int64: the step that sampled the token, −1 where the policy did not."""

    @property
    def images(self) -> Sequence[ImageInput]:
        """The images, in the order of their pads."""


@dataclass(frozen=True, kw_only=True)
class ModelBatch:
    """Sequences padded on the right, with what the model needs to read them.

    Causal attention keeps the padding out of every real token, so there is no attention mask.
    """

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [3, B, T] int64: time, height, width
    step_ids: Tensor  # [B, T] int64, -1: not sampled by the policy, or padding
    valid: Tensor  # [B, T] bool, False on padding
    pixel_values: Tensor | None = None  # [P, D] float32
    image_grid_thw: Tensor | None = None  # [images, 3] int64

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ModelBatch:
        """The batch on ``device``."""
        return moved(self, device, non_blocking=non_blocking)


def collate(samples: Sequence[TokenSequence], *, pad_id: int, image_token_id: int, merge_size: int) -> ModelBatch:
    """Pad sequences to the longest and join their images.

    Args:
        samples: at least one sequence.
        pad_id: id put behind the end of the shorter sequences.
        image_token_id: id of ``<|image_pad|>``.
        merge_size: side of the square of patches that makes one token.

    Raises:
        DataError: if there is no sample, or one whose step ids are not as many as its tokens.
        RenderError: if the image pads of a sample are not those of its images.
    """
    step_ids, valid = step_table(samples)
    input_ids = torch.full(step_ids.shape, pad_id, dtype=torch.long)
    position_ids = torch.zeros(3, *step_ids.shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        input_ids[row, :length] = sample.token_ids
        grids = [image.grid_thw for image in sample.images]
        positions, _ = mrope_positions(sample.token_ids, grids, image_token_id=image_token_id, merge_size=merge_size)
        position_ids[:, row, :length] = positions
    images = [image for sample in samples for image in sample.images]
    return ModelBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        step_ids=step_ids,
        valid=valid,
        **joined(images),
    )


def step_table(samples: Sequence[TokenSequence]) -> tuple[Tensor, Tensor]:
    """Step ids ``[B, T]`` of the samples, −1 behind their ends, and the mask ``[B, T]`` of their tokens.

    Raises:
        DataError: if there is no sample, or one whose step ids are not as many as its tokens.
    """
    if not samples:
        raise DataError("no sample to collate: give at least one")
    lengths = [len(sample.token_ids) for sample in samples]
    step_ids = torch.full((len(samples), max(lengths)), -1, dtype=torch.long)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        if len(sample.step_ids) != length:
            raise DataError(f"sample {row} has {length} tokens but {len(sample.step_ids)} step ids: give one a token")
        step_ids[row, :length] = sample.step_ids
    return step_ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def joined(images: Sequence[ImageInput]) -> dict[str, Tensor | None]:
    """The images as the fields ``pixel_values`` ``[P, D]`` and ``image_grid_thw`` ``[images, 3]`` of a batch."""
    return {
        "pixel_values": torch.cat([image.pixel_values for image in images]) if images else None,
        "image_grid_thw": torch.tensor([image.grid_thw for image in images]) if images else None,
    }


def moved(record: Record, device: torch.device | str, *, non_blocking: bool = False) -> Record:
    """A copy of a dataclass whose tensors lie on ``device``."""
    # typed as anything: only type checkers know the type of all dataclasses
    batch: Any = record
    tensors = {
        field.name: value.to(device, non_blocking=non_blocking)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    copy: Record = replace(batch, **tensors)
    return copy
