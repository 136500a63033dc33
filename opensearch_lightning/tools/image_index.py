"""A local reverse image search: which indexed picture is this one, or a part of it, perhaps blurred or seen askew?

Two stages, no weights. A short list by perceptual hash, by a small colour thumbnail and by votes of SIFT features
(FLANN); then a check of each candidate by the colours of the two pictures laid over each other, whole on whole or as
a RANSAC warp between the features says. What passes no check is no hit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import cv2
import numpy as np
from PIL import Image

from opensearch_lightning.errors import DataError
from opensearch_lightning.tools.picture_match import (
    HASH_BITS,
    LOOK_SIDE,
    THUMB_SIDE,
    Array,
    Features,
    Glance,
    agreement,
    glance,
    overlaid,
    scaled_pixels,
    sift_features,
    warps,
)

_FILE = "images.npz"
# Agreement of two whole pictures above which no feature is looked at: it saves the larger part of a search.
_PLAIN = 0.97
_SAME_PICTURE = 0.995
_FLANN_KDTREE = 1
_FLANN_TREES = 4
_FLANN_CHECKS = 48
_NEAR_SQUARED = 0.35
_MIN_VOTES = 3


@dataclass(frozen=True, kw_only=True)
class ImageHit:
    """One indexed picture found. ``score`` in [0, 1] is the agreement of colours once laid over each other."""

    id: str
    title: str
    url: str
    score: float


@dataclass(frozen=True, kw_only=True)
class _Entry:
    id: str
    title: str
    url: str
    glance: Glance
    features: Features


class ImageIndex:
    """Reverse search over pictures kept in one directory; all it needs lies in memory. Safe to share by threads.

    Args:
        min_agreement: a hit needs at least this agreement of colours, in [0, 1], where matched features say how the two
            pictures lie.
        min_whole_agreement: the same where nothing but the whole pictures' likeness speaks for it.
        min_margin: how much better than the next different picture the best must agree, else nothing is certain.
        min_inliers: matched features that a warp must explain before it is believed.
        min_coverage: part of the query that the indexed picture must fill, in [0, 1]: a small emblem in a large scene
            is found only after cropping.
        shortlist: candidates checked, per way of finding them.
    """

    def __init__(
        self,
        entries: list[_Entry],
        *,
        max_features: int = 128,
        min_agreement: float = 0.85,
        min_whole_agreement: float = 0.93,
        min_margin: float = 0.02,
        min_inliers: int = 8,
        min_coverage: float = 0.25,
        shortlist: int = 4,
    ) -> None:
        self._entries = entries
        self._max_features = max_features
        self._min_agreement = min_agreement
        self._min_whole_agreement = min_whole_agreement
        self._min_margin = min_margin
        self._min_inliers = min_inliers
        self._min_coverage = min_coverage
        self._shortlist = shortlist
        self._bits = np.array([e.glance.bits for e in entries], bool).reshape(-1, HASH_BITS)
        self._thumbs = np.array([e.glance.thumb for e in entries], np.float32).reshape(-1, THUMB_SIDE * THUMB_SIDE * 3)
        self._owner = np.repeat(np.arange(len(entries)), [len(e.features.vectors) for e in entries])
        self._matcher = self._build_matcher()

    def _build_matcher(self) -> Any | None:
        if not len(self._owner):
            return None
        # FLANN reads the vectors where they lie, so they are kept.
        self._vectors = np.concatenate([entry.features.vectors for entry in self._entries])
        cv2.setRNGSeed(0)
        matcher = cv2.flann.Index()
        matcher.build(self._vectors, {"algorithm": _FLANN_KDTREE, "trees": _FLANN_TREES})
        return matcher

    @classmethod
    def build(
        cls, path: str | Path, entries: Iterable[tuple[str, str, str, Image.Image]], *, max_features: int = 128
    ) -> ImageIndex:
        """Index ``(id, title, url, picture)`` entries into the new directory ``path`` and open it.

        Raises:
            DataError: ``path`` already exists.
        """
        target = Path(path)
        if target.exists():
            raise DataError(f"Image index {target} already exists: remove it or choose another path.")
        rows = []
        for entry_id, title, url, image in entries:
            pixels = scaled_pixels(image)
            features = sift_features(pixels, max_features)
            rows.append(_Entry(id=entry_id, title=title, url=url, glance=glance(pixels), features=features))
        partial = target.with_name(f".{target.name}.{uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            np.savez_compressed(
                partial / _FILE, allow_pickle=False, max_features=np.array(max_features), **_arrays(rows)
            )
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls.open(target)

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> ImageIndex:
        """Load an index that :meth:`build` wrote; ``options`` are those of the constructor.

        Raises:
            DataError: nothing usable is there.
        """
        try:
            with np.load(Path(path) / _FILE, allow_pickle=False) as stored:
                arrays = dict(stored)
            entries = _entries(arrays)
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(f"No image index at {path} ({error}): build one with ImageIndex.build.") from error
        return cls(entries, max_features=int(arrays["max_features"]), **options)

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._entries)

    def search(self, image: Image.Image, top_k: int = 5) -> list[ImageHit]:
        """Indexed pictures that ``image`` shows, best first, at most ``top_k``; empty when none is certain.

        Several hits mean that the indexed pictures themselves look the same.
        """
        if not self._entries:
            return []
        pixels = scaled_pixels(image)
        query = glance(pixels)
        scores = {i: self._whole_score(query, self._entries[i]) for i in self._looking_alike(query)}
        if max(scores.values()) < _PLAIN:
            self._match_features(query, sift_features(pixels, 2 * self._max_features), scores)
        return [self._hit(index, scores[index]) for index in self._certain(scores)[:top_k]]

    def _whole_score(self, query: Glance, entry: _Entry) -> float:
        score = agreement(query.look, entry.glance.look)
        return score if score >= self._min_whole_agreement else 0.0

    def _looking_alike(self, query: Glance) -> list[int]:
        """Pictures nearest by hash and nearest by thumbnail."""
        distance = np.count_nonzero(self._bits != query.bits, axis=1)
        by_hash = np.argsort(distance, kind="stable")[: self._shortlist]
        by_thumb = np.argsort(-(self._thumbs @ query.thumb), kind="stable")[: self._shortlist]
        return list(dict.fromkeys([*by_hash.tolist(), *by_thumb.tolist()]))

    def _match_features(self, query: Glance, features: Features, scores: dict[int, float]) -> None:
        """Raise ``scores`` to what a warp between features achieves, for those there and those most voted for."""
        for index in [*scores, *self._most_voted(features)]:
            entry = self._entries[index]
            best = scores.get(index, 0.0)
            for warp in warps(entry.features, features, self._min_inliers):
                score, covered = overlaid(entry.glance.look, entry.features.size, query.look, features.size, warp)
                if covered >= self._min_coverage:
                    best = max(best, score)
            scores[index] = best

    def _most_voted(self, features: Features) -> list[int]:
        if self._matcher is None or not len(features.vectors):
            return []
        neighbours, squared = self._matcher.knnSearch(features.vectors, 1, params={"checks": _FLANN_CHECKS})
        near = squared[:, 0] < _NEAR_SQUARED
        votes = np.bincount(self._owner[neighbours[near, 0]], minlength=len(self._entries))
        order = np.argsort(-votes, kind="stable")[: self._shortlist]
        return [int(index) for index in order if votes[index] >= _MIN_VOTES]

    def _certain(self, scores: dict[int, float]) -> list[int]:
        """The best picture and its doubles; nothing when a different picture agrees almost as well."""
        passed = sorted((i for i in scores if scores[i] >= self._min_agreement), key=lambda i: (-scores[i], i))
        if not passed:
            return []
        winner = passed[0]
        same = [i for i in passed if self._alike(winner, i)]
        rival = max((scores[i] for i in passed if i not in same), default=0.0)
        return same if scores[winner] - rival >= self._min_margin else []

    def _alike(self, first: int, second: int) -> bool:
        looks = (self._entries[first].glance.look, self._entries[second].glance.look)
        return first == second or agreement(*looks) >= _SAME_PICTURE

    def _hit(self, index: int, score: float) -> ImageHit:
        entry = self._entries[index]
        return ImageHit(id=entry.id, title=entry.title, url=entry.url, score=round(score, 4))


def _arrays(entries: list[_Entry]) -> dict[str, Array]:
    none = not entries
    return {
        "texts": np.array([(e.id, e.title, e.url) for e in entries], str).reshape(-1, 3),
        "bits": np.array([e.glance.bits for e in entries], bool).reshape(-1, HASH_BITS),
        "thumbs": np.array([e.glance.thumb for e in entries], np.float32),
        "looks": np.array([e.glance.look for e in entries], np.uint8).reshape(-1, LOOK_SIDE, LOOK_SIDE, 3),
        "sizes": np.array([e.features.size for e in entries], np.int64).reshape(-1, 2),
        "counts": np.array([len(e.features.points) for e in entries], np.int64),
        "points": np.zeros((0, 2), np.float32) if none else np.concatenate([e.features.points for e in entries]),
        "vectors": np.zeros((0, 128), np.float32) if none else np.concatenate([e.features.vectors for e in entries]),
    }


def _entries(arrays: dict[str, Array]) -> list[_Entry]:
    starts = np.cumsum(arrays["counts"])[:-1]
    points, vectors = np.split(arrays["points"], starts), np.split(arrays["vectors"], starts)
    entries = []
    for i, (entry_id, title, url) in enumerate(arrays["texts"].tolist()):
        width, height = arrays["sizes"][i].tolist()
        look = Glance(bits=arrays["bits"][i], thumb=arrays["thumbs"][i], look=arrays["looks"][i])
        features = Features(size=(width, height), points=points[i], vectors=vectors[i])
        entries.append(_Entry(id=entry_id, title=title, url=url, glance=look, features=features))
    return entries
