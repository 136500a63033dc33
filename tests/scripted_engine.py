"""An engine that says what a test tells it to: the policy's part played from a script, tokens and all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from torch import Tensor

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.errors import RolloutLost
from opensearch_lightning.rollout import FinishReason, Generation, SamplingParams, SessionKey
from opensearch_lightning.types import ImageInput

Turn = str | tuple[str, FinishReason] | Exception
"""Text of a turn; text with another end than the end-of-turn token; or the failure of the engine."""


@dataclass
class ScriptedSession:
    """Plays one script; keeps what it was given."""

    renderer: ChatRenderer
    turns: Sequence[Turn]
    given: list[list[int]] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput], sampling: SamplingParams, step: int
    ) -> Generation:
        self.given.append(list(token_ids))
        turn = self.turns[min(step, len(self.turns) - 1)]
        if isinstance(turn, Exception):
            raise RolloutLost(str(turn)) from turn
        text, finish = turn if isinstance(turn, tuple) else (turn, FinishReason.STOP)
        ids = self.renderer.action(text)
        if finish is FinishReason.STOP:
            ids = [*ids, self.renderer.end_of_turn_id]
        return Generation(token_ids=ids, logprobs=[-0.5] * len(ids), finish=finish)


class ScriptedEngine:
    """Plays ``scripts[task_id]`` (or the one script) to every rollout of the task."""

    def __init__(self, renderer: ChatRenderer, scripts: Mapping[str, Sequence[Turn]] | Sequence[Turn]) -> None:
        self.renderer = renderer
        self.weight_version = 0
        self.scripts = scripts
        self.sessions: dict[SessionKey, ScriptedSession] = {}

    @asynccontextmanager
    async def session(self, key: SessionKey) -> AsyncIterator[ScriptedSession]:
        turns = self.scripts[key.task_id] if isinstance(self.scripts, Mapping) else self.scripts
        self.sessions[key] = ScriptedSession(self.renderer, turns)
        yield self.sessions[key]

    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weight_version = version
