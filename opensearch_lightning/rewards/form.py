"""The format part of the reward (Eq. 9, ``r_fmt``)."""

from collections.abc import Sequence

from opensearch_lightning.types import Step


def format_reward(steps: Sequence[Step], *, complete: bool = True) -> float:
    """Mean over ``steps`` of 1[surface form right and no tool-execution error at that step], in [0, 1].

    The surface form is right when the action is well formed and of the kind that its place asks for: a call before
    the trajectory's last step, a response at it.

    Args:
        steps: the steps to judge, in order; of a fatal trajectory those before its fatal step.
        complete: whether the last of ``steps`` is the last of the trajectory. A valid prefix is not complete, so
            each of its steps has to be a call.

    Returns:
        0.0 for no steps at all (a trajectory that is fatal from its first step has no valid prefix).
    """
    if not steps:
        return 0.0
    last = len(steps) - 1 if complete else None
    return sum(_is_right(step, is_last=i == last) for i, step in enumerate(steps)) / len(steps)


def _is_right(step: Step, *, is_last: bool) -> bool:
    kind = "response" if is_last else "tool_call"
    return step.action.well_formed and step.action.kind == kind and step.error is None
