"""What the agent loop needs of an engine: sessions that take new tokens and give sampled ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from opensearch_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from opensearch_lightning.chat import ChatRenderer
    from opensearch_lightning.types import ImageInput, RewardParts, Task, Trajectory


class FinishReason(StrEnum):
    """Why one generation ended: the end-of-turn token, its token limit, or the engine's context length."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. ``temperature=0`` is greedy; ``top_p=1`` and ``top_k=0`` are off.

    ``seed`` keys the sampling noise together with (task, rollout, step).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_turn_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 100:
            raise ConfigurationError(f"temperature is {self.temperature}; set 0 (greedy), or 0.001 to 100")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p is {self.top_p}; set it in (0, 1], 1 turns it off")
        if self.top_k < 0 or self.max_turn_tokens < 1:
            raise ConfigurationError(
                f"top_k is {self.top_k} and max_turn_tokens {self.max_turn_tokens}; set them to at least 0 and 1"
            )


@dataclass(frozen=True, kw_only=True, order=True)
class SessionKey:
    """Names one trajectory: keys its noise, and orders the batch in reproducible mode."""

    task_id: str
    rollout: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Sampled tokens of one turn, with log-probabilities of the distribution they were drawn from.

    With ``finish == STOP`` the last id is the end-of-turn token. ``weight_versions`` names the weights that each token
    was sampled from; an engine whose weights never change while rollouts run may leave it empty.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    weight_versions: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine has done since it was made.

    ``busy_s``: wall seconds with a batch on the model. ``processor_s``: processor seconds of the engine's thread
    for it, which do not grow where others use the machine.
    """

    busy_s: float = 0.0
    processor_s: float = 0.0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0


class Reward(Protocol):
    """Scores one finished trajectory, as :class:`~opensearch_lightning.rewards.CompositeReward` does."""

    async def score(self, task: Task, trajectory: Trajectory) -> RewardParts:
        """Reward of ``trajectory``.

        Raises:
            JudgeError: a judge could not be reached or read.
            JudgeUnavailable: it fails too often to go on.
        """
        ...


class EngineSession(Protocol):
    """One growing sequence. What was sampled stays in it: pass only what is new."""

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput], sampling: SamplingParams, step: int
    ) -> Generation:
        """Append ``token_ids`` (image pads expanded) and ``images``, then sample one turn.

        Raises:
            RolloutLost: the engine cannot go on with this sequence.
        """
        ...


class RolloutEngine(Protocol):
    """Samples tokens from the policy. ``weight_version`` is the last one given to :meth:`update_weights`.

    Two things an engine may have besides: ``live_updates = True`` where :meth:`update_weights` may come while sessions
    are open, from any thread, which asynchronous rollouts need; and ``stats()``, which returns :class:`EngineStats`.
    """

    renderer: ChatRenderer
    weight_version: int

    def session(self, key: SessionKey) -> AbstractAsyncContextManager[EngineSession]:
        """Open one sequence; leaving the context frees it."""
        ...

    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bring the engine to the given weights.

        Raises:
            ConfigurationError: a name or shape does not belong to the engine's model, or one of its own is missing.
        """
        ...
