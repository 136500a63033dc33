"""What the executor asks of a tool, and what a tool gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from PIL.Image import Image

    from opensearch_lightning.tools.images import ImageBook


@dataclass(frozen=True, kw_only=True)
class CallKey:
    """Where in which rollout a call was made: all that injected faults depend on besides their seed."""

    task_id: str
    rollout: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ToolOutput:
    """What a tool made of one call.

    ``text`` goes to the policy; with an ``image`` the executor puts the image's new name and size before it. ``hits``
    counts the results of a search. ``note`` is a sentence that says where the tool fell back or did less than asked;
    the executor appends it to the text. ``partial`` marks a result that a part of its backends failed for: it is given
    to this call and never kept for another.
    """

    text: str = ""
    image: Image | None = None
    hits: int | None = None
    note: str | None = None
    partial: bool = False


class Tool(Protocol):
    """One tool the policy can call.

    ``backend`` names the service behind it: tools of one backend go down together. ``schema`` is the function schema
    as Qwen's chat template prints it, ``{"type": "function", "function": {"name", "description", "parameters"}}``;
    the executor checks arguments against its ``parameters`` before :meth:`run` sees them. A string parameter with
    ``"format": "image-id"`` takes the name of an image of the rollout. A tool may have a text ``variant``: what,
    besides its schema, its results depend on, such as a model; a kept result of another variant is never given.
    """

    @property
    def name(self) -> str:
        """Wire name."""
        ...

    @property
    def backend(self) -> str:
        """Service behind the tool."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema."""
        ...

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call; blocking work goes to :func:`opensearch_lightning.tools.threads.in_thread`.

        Args:
            arguments: checked, with defaults filled in.
            images: the images of the rollout so far.

        Raises:
            ToolError: the call failed; any other exception counts as ``backend_error``.
        """
        ...


@runtime_checkable
class LimitedTool(Tool, Protocol):
    """A tool whose backend bears only so many calls at once; waiting for a turn does not count towards a timeout."""

    @property
    def backend_limit(self) -> int:
        """Calls of this backend at once, at least 1."""
        ...


Probe = Callable[[], Awaitable[None]]
"""One cheap try of a service; raises :class:`~opensearch_lightning.errors.ToolError` where it fails."""


@runtime_checkable
class ProbedTool(Tool, Protocol):
    """A tool that can say which of the services behind it work."""

    def probes(self) -> Mapping[str, Probe]:
        """A try of each service, by its name."""
        ...


@runtime_checkable
class ClosableTool(Tool, Protocol):
    """A tool that holds connections."""

    async def aclose(self) -> None:
        """Close them, on the loop that :meth:`run` ran on; a later call opens new ones."""
        ...
