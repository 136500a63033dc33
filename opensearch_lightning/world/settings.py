"""What a world is made from; equal settings make equal pages, tasks and pictures, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.world.pictures import PictureKind

DEFAULT_SPLITS: Mapping[str, int] = {"sft": 2000, "rl": 300, "val": 50, "test": 200}
DEFAULT_HOPS: Mapping[int, float] = {2: 0.4, 3: 0.4, 4: 0.2}
DEFAULT_PICTURES: Mapping[str, float] = {
    "emblem": 0.48,
    "labelled": 0.12,
    "sign": 0.12,
    "scene": 0.08,
    "blurred": 0.07,
    "small": 0.07,
    "skewed": 0.06,
}


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """Settings of one world.

    Attributes:
        pages: number of entities, each with its page and emblem; other pages come on top.
        seed: of every random choice.
        splits: name → number of tasks; no two tasks share a path.
        hop_probabilities: hops → share of the tasks.
        pictures: picture kind → share of the tasks of each split.
        hub_in_degree: pages that more than so many others link to are hubs; no walk passes through one.
        min_in_degree: so many pages at least link to an anchor.

    Raises:
        ConfigurationError: shares that do not sum to 1, unknown kinds, sizes or a seed below 0.
    """

    pages: int = 150
    seed: int = 0
    splits: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_SPLITS))
    hop_probabilities: Mapping[int, float] = field(default_factory=lambda: dict(DEFAULT_HOPS))
    pictures: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_PICTURES))
    hub_in_degree: int = 24
    min_in_degree: int = 1

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigurationError(f"seed={self.seed}: must be 0 or more")
        unknown = sorted(set(self.pictures) - set(PictureKind))
        if unknown:
            raise ConfigurationError(f"pictures names {unknown}: the kinds are {', '.join(PictureKind)}")
        total = sum(self.pictures.values())
        if not self.pictures or min(self.pictures.values()) < 0 or abs(total - 1) > 1e-6:
            raise ConfigurationError(f"pictures={dict(self.pictures)} sum to {total:g}: shares must sum to 1")
        if not self.splits or min(self.splits.values()) < 0 or not sum(self.splits.values()):
            raise ConfigurationError(f"splits={dict(self.splits)}: give each split a size of 0 or more, and some task")
        bad = [name for name in self.splits if not name.isidentifier()]
        if bad:
            raise ConfigurationError(f"splits names {bad}: a split's name is a file's name, letters and digits only")
