"""The error tree: each failure belongs to one boundary, and its message names the input and the remedy.

A bad rollout is data (:class:`~opensearch_lightning.types.ToolResult`, :class:`~opensearch_lightning.types.StopReason`)
and raises nothing. What raises is a bad configuration, a bad file, a judge or an engine that cannot be used.
"""

from opensearch_lightning.types import ErrorKind


def one_line(text: object) -> str:
    """``text`` with white space collapsed: messages and results are one line each."""
    return " ".join(str(text).split())


class OpenSearchError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(OpenSearchError, ValueError):
    """A setting cannot work: the message names it, its value, and what to set instead."""


class DataError(OpenSearchError, ValueError):
    """A file, row or shard cannot be used: the message names it and the reason."""


class RenderError(OpenSearchError, ValueError):
    """A conversation or chat template cannot be rendered to the tokens that training needs."""


class ToolError(OpenSearchError):
    """Raised inside a tool; the executor turns it into a :class:`~opensearch_lightning.types.ToolResult`.

    Args:
        kind: which error of the closed list this is.
        message: what the policy is told; it names the argument and what to do.
        retry_after_s: seconds after which the backend said to come back.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s


class JudgeError(OpenSearchError):
    """A judge could not be reached or read. The trajectory is left out of its group; it is never scored 0."""


class JudgeUnavailable(OpenSearchError):
    """A judge failed on too large a share of its judgements: the run stops, for what it learns from would be chance.

    It is no :class:`JudgeError`: it passes the places where a single trajectory is left out.
    """


class RolloutLost(OpenSearchError):
    """A rollout was lost to infrastructure (an engine died). It is retried, then dropped and counted."""
