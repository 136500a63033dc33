"""Tells a policy that runs in circles: one n-gram to the end of its turn, or one call again and again."""

import json
from collections.abc import Sequence

from opensearch_lightning.types import Step


def repeats_ngram(token_ids: Sequence[int], *, max_ngram: int = 32, min_repeats: int = 4) -> bool:
    """Whether the tokens end in one n-gram (``n`` up to ``max_ngram``) at least ``min_repeats`` times in a row.

    At least half of the tokens must lie in the loop: a turn that was cut while it listed a few equal things is not one.
    """
    for size in range(1, min(max_ngram, len(token_ids) // min_repeats) + 1):
        period = 0
        for index in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[index] != token_ids[index - size]:
                break
            period += 1
        looped = period + size
        if looped >= size * min_repeats and 2 * looped >= len(token_ids):
            return True
    return False


def repeated_call_onset(steps: Sequence[Step], k: int) -> int | None:
    """First step of ``k`` equal calls in a row at the end of ``steps``, or ``None``.

    Calls that failed are not counted: to try a failed call again is the right thing to do, and the error counter looks
    after those who never stop.
    """
    tail = steps[-k:]
    if len(tail) < k or any(step.action.kind != "tool_call" or step.error is not None for step in tail):
        return None
    calls = {json.dumps([step.action.name, step.action.arguments], sort_keys=True) for step in tail}
    return tail[0].index if len(calls) == 1 else None
