"""What two pictures have in common: perceptual hash, colours, SIFT features, and the warps between them.

Shapes: ``N`` features of a picture. All pixels are RGB ``uint8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]

HASH_BITS = 64
THUMB_SIDE = 16
LOOK_SIDE = 64
FEATURE_SIDE = 192
_MIN_HUE = 0.93
_RATIO = 0.85
_RANSAC_PIXELS = 5.0


@dataclass(frozen=True, kw_only=True)
class Glance:
    """What is cheap to know of a picture: 64 hash bits, a thumbnail, a small look."""

    bits: Array  # [64] bool
    thumb: Array  # [16*16*3] float32, mean of each channel 0, norm of the whole 1
    look: Array  # [64, 64, 3] uint8


@dataclass(frozen=True, kw_only=True)
class Features:
    """RootSIFT features and where they lie in a picture of ``size`` (width, height)."""

    size: tuple[int, int]
    points: Array  # [N, 2] float32
    vectors: Array  # [N, 128] float32


def scaled_pixels(image: Image.Image) -> Array:
    """``image`` with its longer side brought to 192 pixels.

    Small pictures are enlarged too: SIFT finds little on 64 pixels, and scales must be alike on both sides.
    """
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    factor = FEATURE_SIDE / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC)


def glance(pixels: Array) -> Glance:
    """Hash (pHash of ``imagehash``), thumbnail and look of scaled pixels ``[H, W, 3]``."""
    import imagehash

    return Glance(
        bits=imagehash.phash(Image.fromarray(pixels)).hash.ravel(),
        thumb=detail(cv2.resize(pixels, (THUMB_SIDE, THUMB_SIDE), interpolation=cv2.INTER_AREA)),
        look=cv2.resize(pixels, (LOOK_SIDE, LOOK_SIDE), interpolation=cv2.INTER_AREA),
    )


def sift_features(pixels: Array, limit: int) -> Features:
    """The ``limit`` strongest SIFT features (OpenCV) of scaled pixels ``[H, W, 3]``, as RootSIFT."""
    height, width = pixels.shape[:2]
    sift = cv2.SIFT_create(nfeatures=limit, contrastThreshold=0.01, edgeThreshold=20)
    keypoints, found = sift.detectAndCompute(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), None)
    if found is None or not keypoints:
        points, vectors = np.zeros((0, 2), np.float32), np.zeros((0, 128), np.float32)
    else:
        points = np.array([keypoint.pt for keypoint in keypoints[:limit]], np.float32)
        vectors = np.sqrt(found[:limit] / (found[:limit].sum(axis=1, keepdims=True) + 1e-7)).astype(np.float32)
    return Features(size=(width, height), points=points, vectors=vectors)


def _unit(values: Array) -> Array:
    norm = float(np.linalg.norm(values))
    return values / norm if norm > 1e-3 else np.zeros_like(values)


def detail(pixels: Array) -> Array:
    """Pixels ``[..., 3]`` less the mean of each channel, as one float32 vector of norm 1 (0 for a flat picture)."""
    rows = pixels.reshape(-1, 3).astype(np.float32)
    return _unit((rows - rows.mean(axis=0)).ravel())


def agreement(first: Array, second: Array) -> float:
    """How far two pictures of one shape ``[..., 3]`` show the same, in [0, 1].

    Correlation of their detail; 0 when their colours differ as a whole. Both are indifferent to brightness.
    """
    hue = float(_unit(first.ravel().astype(np.float32)) @ _unit(second.ravel().astype(np.float32)))
    return max(0.0, float(detail(first) @ detail(second))) if hue >= _MIN_HUE else 0.0


def warps(entry: Features, query: Features, min_inliers: int) -> list[Array]:
    """Maps ``[3, 3]`` from points of ``entry`` to points of ``query`` that at least ``min_inliers`` matches agree on.

    An affine one besides the homography: few points close together leave the latter free to run wild elsewhere.
    """
    if min(len(query.vectors), len(entry.vectors)) < max(min_inliers, 4):
        return []
    pairs = cv2.BFMatcher(cv2.NORM_L2).knnMatch(entry.vectors, query.vectors, k=2)
    good = [pair[0] for pair in pairs if pair[0].distance < _RATIO * pair[1].distance]
    if len(good) < max(min_inliers, 4):
        return []
    source = np.array([entry.points[match.queryIdx] for match in good], np.float32)
    target = np.array([query.points[match.trainIdx] for match in good], np.float32)
    cv2.setRNGSeed(0)
    homography, believed = cv2.findHomography(source, target, cv2.RANSAC, _RANSAC_PIXELS)
    affine, agreed = cv2.estimateAffine2D(source, target, ransacReprojThreshold=_RANSAC_PIXELS)
    found = []
    if homography is not None and int(believed.sum()) >= min_inliers:
        found.append(np.asarray(homography, np.float64))
    if affine is not None and int(agreed.sum()) >= min_inliers:
        found.append(np.vstack([affine, [0.0, 0.0, 1.0]]))
    return found


def overlaid(
    entry_look: Array, entry_size: tuple[int, int], query_look: Array, query_size: tuple[int, int], warp: Array
) -> tuple[float, float]:
    """Lay a picture over another as ``warp`` says: ``(agreement where they overlap, part of the query covered)``.

    Both 0 for a warp that mirrors or folds the picture.
    """
    width, height = entry_size
    corners = np.array([[[0, 0]], [[width, 0]], [[width, height]], [[0, height]]], np.float64)
    placed = cv2.perspectiveTransform(corners, warp)[:, 0].astype(np.float32)
    # OpenCV's oriented area is positive for corners that run clockwise on the screen, as these do.
    if not cv2.isContourConvex(placed) or cv2.contourArea(placed, True) <= 0:
        return 0.0, 0.0
    from_look = np.diag([width / LOOK_SIDE, height / LOOK_SIDE, 1.0])
    to_look = np.diag([LOOK_SIDE / query_size[0], LOOK_SIDE / query_size[1], 1.0])
    between = to_look @ warp @ from_look
    frame = (LOOK_SIDE, LOOK_SIDE)
    laid = cv2.warpPerspective(entry_look, between, frame)
    inside = cv2.warpPerspective(np.full((LOOK_SIDE, LOOK_SIDE), 255, np.uint8), between, frame) == 255
    if not inside.any():
        return 0.0, 0.0
    return agreement(laid[inside], query_look[inside]), float(inside.mean())
