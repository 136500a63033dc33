"""Keyed sampling noise: a pure function of (seed, task, rollout, step), whatever the order and batching."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.rollout.protocol import SessionKey


def turn_uniforms(seed: int, key: SessionKey, step: int, count: int) -> NDArray[np.float64]:
    """``count`` uniforms in [0, 1), one for each token the turn may sample."""
    name = f"{seed}\x1f{key.task_id}\x1f{key.rollout}\x1f{step}".encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.random(count)
