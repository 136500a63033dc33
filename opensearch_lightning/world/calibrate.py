"""Pictures of anchors, each kept only when the tools really behave on it as its kind says.

Checked with the very tools that the agent gets. A degraded picture is tried at one strength after the other; the first
is kept at which the raw picture is not recognised and the repaired one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from opensearch_lightning.tools.image_index import ImageIndex
from opensearch_lightning.tools.picture_tools import crop, perspective_correct, sharpen, super_resolution
from opensearch_lightning.world.entities import Entity
from opensearch_lightning.world.pictures import (
    Box,
    PictureKind,
    blur,
    draw_labelled,
    draw_scene,
    draw_sign,
    shrink,
    skew,
)

ReadText = Callable[[Image.Image], str]

IMAGE_SEARCH, OCR = "image_search", "layout_parsing"

# Defaults of the tools: the agent's call needs no more than the image.
_AMOUNT = 1.5
_SCALE = 4
_BLUR_SIGMAS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_SHRINK_FACTORS = (2.0, 2.5, 3.0)
_SKEW_STRENGTHS = (0.3, 0.4, 0.2)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A picture of an anchor and the calls that lead from it to the anchor's name.

    ``repair`` is the call ``(tool, arguments)`` to make first, on ``img_1``; ``find`` the tools each of which then,
    the usual one first, names the anchor, from ``img_2`` after a repair. ``box`` is the emblem's (x, y, width, height)
    in a scene; ``strength`` that of the degradation.
    """

    kind: PictureKind
    image: Image.Image
    find: tuple[str, ...]
    repair: tuple[str, Mapping[str, Any]] | None = None
    box: Box | None = None
    strength: float | None = None


class PictureMaker:
    """Makes pictures of entities and checks them with the tools.

    Args:
        index: image index that holds the clean emblems.
        read_text: what ``layout_parsing`` reads in a picture.
    """

    def __init__(self, index: ImageIndex, read_text: ReadText) -> None:
        self._index = index
        self._read_text = read_text

    def make(self, rng: np.random.Generator, kind: PictureKind, entity: Entity, emblem: Image.Image) -> Shown | None:
        """A picture of that kind, or ``None`` when no strength does what the kind needs."""
        match kind:
            case PictureKind.EMBLEM:
                return Shown(kind=kind, image=emblem, find=(IMAGE_SEARCH,)) if self._finds(emblem, entity) else None
            case PictureKind.LABELLED:
                return self._labelled(entity, emblem)
            case PictureKind.SIGN:
                return self._sign(rng, entity)
            case PictureKind.SCENE:
                return self._scene(rng, entity, emblem)
            case PictureKind.BLURRED:
                return self._blurred(entity, emblem)
            case PictureKind.SMALL:
                return self._small(rng, entity)
            case PictureKind.SKEWED:
                return self._skewed(rng, entity, emblem)

    def _labelled(self, entity: Entity, emblem: Image.Image) -> Shown | None:
        card = draw_labelled(emblem, entity.name)
        if not self._reads(card, entity) or not self._finds(card, entity):
            return None
        return Shown(kind=PictureKind.LABELLED, image=card, find=(IMAGE_SEARCH, OCR))

    def _sign(self, rng: np.random.Generator, entity: Entity) -> Shown | None:
        sign = draw_sign(rng, entity.name)
        if not self._reads(sign, entity) or self._index.search(sign):
            return None
        return Shown(kind=PictureKind.SIGN, image=sign, find=(OCR,))

    def _scene(self, rng: np.random.Generator, entity: Entity, emblem: Image.Image) -> Shown | None:
        scene, (x, y, width, height) = draw_scene(rng, emblem)
        box = {"x": x, "y": y, "width": width, "height": height}
        if self._index.search(scene) or not self._finds(crop(scene, x, y, width, height).image, entity):
            return None
        return Shown(
            kind=PictureKind.SCENE,
            image=scene,
            find=(IMAGE_SEARCH,),
            repair=("crop", box),
            box=(x, y, width, height),
        )

    def _blurred(self, entity: Entity, emblem: Image.Image) -> Shown | None:
        for sigma in _BLUR_SIGMAS:
            image = blur(emblem, sigma)
            if not self._index.search(image) and self._finds(sharpen(image, _AMOUNT).image, entity):
                return Shown(
                    kind=PictureKind.BLURRED, image=image, find=(IMAGE_SEARCH,), repair=("sharpen", {}), strength=sigma
                )
        return None

    def _small(self, rng: np.random.Generator, entity: Entity) -> Shown | None:
        sign = draw_sign(rng, entity.name)
        for factor in _SHRINK_FACTORS:
            image = shrink(sign, factor)
            if self._index.search(image) or self._reads(image, entity):
                continue
            if self._reads(super_resolution(image, _SCALE).image, entity):
                return Shown(
                    kind=PictureKind.SMALL,
                    image=image,
                    find=(OCR,),
                    repair=("super_resolution", {}),
                    strength=factor,
                )
        return None

    def _skewed(self, rng: np.random.Generator, entity: Entity, emblem: Image.Image) -> Shown | None:
        for strength in _SKEW_STRENGTHS:
            image = skew(rng, emblem, strength)
            if not self._index.search(image) and self._finds(perspective_correct(image).image, entity):
                return Shown(
                    kind=PictureKind.SKEWED,
                    image=image,
                    find=(IMAGE_SEARCH,),
                    repair=("perspective_correct", {}),
                    strength=strength,
                )
        return None

    def _finds(self, image: Image.Image | None, entity: Entity) -> bool:
        return image is not None and [hit.title for hit in self._index.search(image)] == [entity.title]

    def _reads(self, image: Image.Image | None, entity: Entity) -> bool:
        # A name that several things share does not say which of them the board belongs to.
        return image is not None and entity.name == entity.title and self._read_text(image) == entity.name
