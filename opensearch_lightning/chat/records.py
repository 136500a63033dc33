"""What goes into the renderer and what comes out of it.

Shapes: ``T`` tokens with image pads expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from opensearch_lightning.types import ImageInput

Part = str | Image.Image | bytes
"""Piece of a turn from outside: text, or a picture (PIL image or the bytes of an image file)."""


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """What the user says."""

    parts: Sequence[Part]


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """What the policy says, without ``<|im_end|>``."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ObservationTurn:
    """What a tool returned. Observations in a row share one turn of the template."""

    parts: Sequence[Part]


Turn = UserTurn | AssistantTurn | ObservationTurn


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Tokens to append to a running conversation, and the images they hold."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenizedSample:
    """A whole conversation as tokens. Each assistant turn is a step, its ``<|im_end|>`` included."""

    token_ids: Tensor  # [T] int64
    step_ids: Tensor  # [T] int64, -1 where the policy did not speak
    images: tuple[ImageInput, ...] = ()
