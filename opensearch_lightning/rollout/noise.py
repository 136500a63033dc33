"""Keyed sampling noise: a pure function of (seed, task, rollout, step), whatever the order and batching."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.rollout.protocol import SessionKey


def turn_uniforms(seed: int, key: SessionKey, step: int, count: int) -> NDArray[np.float64]:
    """``count`` uniforms in [0, 1), one for each token the turn may sample."""
    generator = np.random.Generator(np.random.Philox(key=_turn_key(seed, key, step)))
    return generator.random(count)


def turn_seed(seed: int, key: SessionKey, step: int) -> int:
    """A seed of 63 bits for one turn, for an engine that draws its own noise."""
    return _turn_key(seed, key, step) >> 65


def _turn_key(seed: int, key: SessionKey, step: int) -> int:
    """128 bits that name one turn."""
    name = f"{seed}\x1f{key.task_id}\x1f{key.rollout}\x1f{step}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
