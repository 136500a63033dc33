"""The records that pass between the parts, and the closed lists of how things end.

Shapes: ``T`` tokens of one trajectory, ``P`` image patches, ``D`` values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@runtime_checkable
class Closable(Protocol):
    """An engine, judge or reward that holds connections."""

    async def aclose(self) -> None:
        """Close them; a later call opens new ones."""
        ...


NON_FATAL = 2**62
"""Fatal step of a trajectory that is not cut: larger than any step index."""


class ErrorKind(StrEnum):
    """Tool-execution errors: the policy's own first, then the infrastructure's."""

    NO_ACTION = "no_action"
    SEVERAL_ACTIONS = "several_actions"
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENT = "invalid_argument"
    UNKNOWN_IMAGE = "unknown_image"
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    UNREACHABLE = "unreachable"
    BACKEND_ERROR = "backend_error"


INFRASTRUCTURE_ERRORS = frozenset(
    {ErrorKind.TIMEOUT, ErrorKind.RATE_LIMITED, ErrorKind.UNREACHABLE, ErrorKind.BACKEND_ERROR}
)
POLICY_ERRORS = frozenset(ErrorKind) - INFRASTRUCTURE_ERRORS


class StopReason(StrEnum):
    """Why a trajectory ended. Only ``RESPONSE`` is an answer."""

    RESPONSE = "response"
    FATAL_ERRORS = "fatal_errors"
    REPETITION = "repetition"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question to answer about one or more pictures.

    ``images`` are encoded files (PNG, JPEG, …) in order; ``aliases`` are other spellings of ``answer`` that count as
    right.
    """

    id: str
    question: str
    answer: str
    images: tuple[bytes, ...]
    aliases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What one policy turn asks for, as read from its text (see :func:`opensearch_lightning.chat.parse_action`).

    ``kind`` is ``"error"`` when the text holds no readable single action; then ``error`` says which kind.
    ``well_formed`` is true for exactly the recipe's surface form: one think block, then one call or response.
    """

    kind: Literal["tool_call", "response", "error"]
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    response: str | None = None
    well_formed: bool = False
    error: ErrorKind | None = None


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool by its wire name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What the executor returned for one action.

    ``tool`` is the canonical wire name, or ``None`` when no known tool was named. ``text`` goes to the policy, also
    when ``error`` is set. ``latency_s`` is wall time in seconds. ``hits`` is the number of results of a search, and
    ``None`` for the other tools. ``injected`` marks an error made by fault injection. ``note`` marks a fallback that
    was said in ``text`` (say, the unchanged image returned).
    """

    tool: str | None
    text: str
    image: Image | None = None
    error: ErrorKind | None = None
    latency_s: float = 0.0
    cached: bool = False
    injected: bool = False
    hits: int | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One policy turn and the observation it got. ``result`` is ``None`` for a response."""

    index: int
    text: str
    action: Action
    result: ToolResult | None = None
    image_name: str | None = None

    @property
    def error(self) -> ErrorKind | None:
        """Kind of the tool-execution error at this step, if any."""
        return self.result.error if self.result is not None else None


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """One image as the policy saw it: its file and its patches.

    ``pixel_values`` is ``[P, D]`` float32 as the image processor made it; ``grid_thw`` counts patches before merging.
    """

    name: str
    encoded: bytes
    pixel_values: Tensor
    grid_thw: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class RewardParts:
    """Reward of one trajectory (Eq. 9): ``total = format · [α·accuracy + (1−α)·query]``.

    ``visual`` is the score of its visual actions, in [0, 1], where a judge was asked about them; ``scorer`` names what
    decided ``accuracy``.
    """

    total: float
    format: float
    accuracy: float
    query: float
    visual: float | None = None
    scorer: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One agent run, token for token as sampled.

    ``token_ids`` ``[T]`` int64 with image pads expanded; ``step_ids`` ``[T]`` int64: the step that sampled the token,
    −1 for prompt and observation; ``sampling_logprobs`` ``[T]`` float32: from the engine, under the distribution it
    sampled from (temperature applied), 0 where not sampled. ``fatal_step`` is the first step that carries no
    gradient under the fatal mask (``NON_FATAL``: none); ``is_fatal`` is what clamp and hard mask look at: a
    trajectory that ran out of turns or tokens is fatal there while ``fatal_step`` stays ``NON_FATAL``.
    ``reward`` is ``None`` until scored, and stays so when a judge failed: such a row has no vote in its group.
    ``weight_version`` and ``last_weight_version`` are those of the weights that sampled the first and the last token;
    they differ where the engine got new weights in between.
    """

    task_id: str
    rollout: int
    steps: tuple[Step, ...]
    images: tuple[ImageInput, ...]
    token_ids: Tensor
    step_ids: Tensor
    sampling_logprobs: Tensor
    stop_reason: StopReason
    fatal_step: int = NON_FATAL
    is_fatal: bool = False
    reward: RewardParts | None = None
    temperature: float = 1.0
    weight_version: int = 0
    last_weight_version: int = 0

    @property
    def response(self) -> str | None:
        """The final answer, or ``None`` when the run was cut before it."""
        answered = self.stop_reason is StopReason.RESPONSE and self.steps
        return self.steps[-1].action.response if answered else None

    @property
    def n_tool_turns(self) -> int:
        """Steps that asked for a tool, whether or not it worked."""
        return sum(step.action.kind == "tool_call" for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """The trajectories of one task.

    ``kept_steps[i]``: steps of trajectory ``i`` below this index carry gradient; ``None`` before a mask was chosen
    (then every sampled token does). ``n_lost`` counts rollouts dropped after an infrastructure failure, those among
    them that took too long also in ``n_abandoned``; ``n_retried`` counts second and further tries.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    kept_steps: tuple[int, ...] | None = None
    n_lost: int = 0
    n_abandoned: int = 0
    n_retried: int = 0


@dataclass(kw_only=True)
class RolloutBatch:
    """Tasks of one GRPO step; callbacks fill ``groups`` in place before ``training_step`` sees it.

    ``split`` names what the batch is for (``"train"``, ``"val_greedy"``, ``"val_sampled"``). ``number`` is the batch's
    place in the order of the data, from 0, where it has one.
    """

    tasks: list[Task]
    groups: list[TrajectoryGroup] = field(default_factory=list)
    split: str = "train"
    number: int | None = None
