"""Fatal steps and the masks that follow from them.

Shapes: ``B`` trajectories, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from opensearch_lightning.errors import ConfigurationError

Onset = Literal["first", "threshold"]
"""Which of the K errors is the fatal step: the one they begin with, or the one that makes them K."""


def find_fatal_step(step_errors: Sequence[bool], k: int = 3, onset: Onset = "first") -> int | None:
    """Fatal step ``f`` of a trajectory: the first run of ``k`` consecutive tool-execution errors.

    Section 4.2 and the released code place ``f`` where the errors commence (``"first"``); the formula of appendix B.1
    places it where their count reaches ``k`` (``"threshold"``).

    Args:
        step_errors: for each step, whether it had an error that counts.
        k: errors in a row that are fatal.
        onset: see above.

    Returns:
        Index of the fatal step, ``None`` for a trajectory without one.

    Raises:
        ConfigurationError: if ``k`` is below 1 or the onset unknown.

    Example:
        >>> find_fatal_step([False, True, True, True], k=3)
        1
    """
    if k < 1:
        raise ConfigurationError(f"fatal k={k} must be at least 1; the paper's is 3")
    if onset not in get_args(Onset):
        raise ConfigurationError(f"fatal onset={onset!r} is unknown: choose from {get_args(Onset)}")
    in_a_row = 0
    for step, error in enumerate(step_errors):
        in_a_row = in_a_row + 1 if error else 0
        if in_a_row == k:
            return step - k + 1 if onset == "first" else step
    return None


def fatal_loss_mask(step_ids_BT: Tensor, fatal_step_B: Tensor) -> Tensor:
    """Tokens that carry gradient: ``M(y_t) = M_gen(y_t) · 1[s(t) < f]`` (Eq. 10).

    Args:
        step_ids_BT: int64, the step that sampled each token, −1 for prompt, observation and padding.
        fatal_step_B: int64, first step that is cut; :data:`~opensearch_lightning.types.NON_FATAL` for none.

    Returns:
        bool ``[B, T]``.
    """
    return (step_ids_BT >= 0) & (step_ids_BT < fatal_step_B[:, None])
