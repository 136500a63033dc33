"""The engine's weights, brought to the policy's once a version."""

from __future__ import annotations

from typing import Any

from opensearch_lightning.models import full_weights
from opensearch_lightning.rollout import RolloutEngine


class EngineWeights:
    """Hands the policy's weights to ``engine``, and leaves out a version that it has already."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._version: int | None = None

    def forget(self) -> None:
        """Hand over the next weights whatever their version is: another fit begins."""
        self._version = None

    def bring_to(self, pl_module: Any, version: int) -> None:
        """Bring the engine to the weights of ``pl_module.policy``, which are those of ``version``."""
        if self._version != version:
            self._engine.update_weights(full_weights(pl_module.policy), version)
            self._version = version
