"""Rows that cannot be used: counted by reason, named, and too many of them end the job."""

from collections import defaultdict
from enum import StrEnum

from opensearch_lightning.errors import ConfigurationError, DataError

_NAMED = 5


class DropReason(StrEnum):
    """Why a row or task is left out."""

    BAD_RECORD = "bad_record"
    BAD_TEXT = "bad_text"
    BAD_TOOLS = "bad_tools"
    BAD_CALL = "bad_call"
    TWO_SYSTEM_PROMPTS = "two_system_prompts"
    CONTROL_STRINGS_IN_TOOLS = "control_strings_in_tools"
    UNKNOWN_ROLE = "unknown_role"
    TURN_ORDER = "turn_order"
    NO_POLICY_TURN = "no_policy_turn"
    EMPTY_POLICY_TURN = "empty_policy_turn"
    ENDS_WITHOUT_POLICY = "ends_without_policy"
    IMAGE_COUNT = "image_count"
    MISSING_IMAGE = "missing_image"
    AMBIGUOUS_IMAGE = "ambiguous_image"
    REMOTE_IMAGE = "remote_image"
    BROKEN_IMAGE = "broken_image"
    NO_QUESTION = "no_question"
    NO_ANSWER = "no_answer"
    NO_SHORT_ANSWER = "no_short_answer"
    DUPLICATE = "duplicate"
    TOO_LONG = "too_long"


class UnusableRow(DataError):
    """One row cannot be used.

    Args:
        reason: which of the closed list.
        message: what was met, without the row's name.
    """

    def __init__(self, reason: DropReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_max_dropped(fraction: float) -> float:
    """``fraction`` itself, a limit on dropped rows.

    Raises:
        ConfigurationError: it does not lie in [0, 1].
    """
    if not isinstance(fraction, int | float) or not 0.0 <= fraction <= 1.0:
        raise ConfigurationError(
            f"max_dropped is the fraction of rows that may be dropped; got {fraction!r}, set 0 to 1."
        )
    return fraction


class DropReport:
    """Counts what was kept and dropped of one source.

    Args:
        source: what the rows came from, for messages.
        limit: largest fraction of dropped rows that is accepted by :meth:`check`.
        remedy: what to do besides raising that limit, for messages.

    Raises:
        ConfigurationError: the limit is no fraction.
    """

    def __init__(self, source: str, *, limit: float = 0.01, remedy: str = "mend the source") -> None:
        self.source = source
        self.remedy = remedy
        self.limit = checked_max_dropped(limit)
        self.kept = 0
        self.dropped: dict[DropReason, list[str]] = defaultdict(list)

    def drop(self, reason: DropReason, name: str) -> None:
        """Count row ``name`` as dropped."""
        self.dropped[reason].append(name)

    @property
    def n_dropped(self) -> int:
        """Rows dropped, all reasons together."""
        return sum(map(len, self.dropped.values()))

    def check(self) -> None:
        """Raise when nothing is left or more than the limit was dropped.

        Raises:
            DataError: naming the reasons, the first rows of each, and the limit.
        """
        total = self.kept + self.n_dropped
        if self.kept == 0:
            raise DataError(f"{self}; nothing is left to use: {self.remedy}.")
        if self.n_dropped > self.limit * total:
            raise DataError(
                f"{self}; at most {self.limit:.1%} may be: {self.remedy}, or raise the limit on dropped rows "
                "(max_dropped)."
            )

    def __str__(self) -> str:
        total = self.kept + self.n_dropped
        reasons = [
            f"{reason} {len(names)} ({', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''})"
            for reason, names in sorted(self.dropped.items())
        ]
        return f"{self.source}: {self.n_dropped} of {total} rows dropped" + (
            f": {'; '.join(reasons)}" if reasons else ""
        )
