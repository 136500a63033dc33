from dataclasses import replace

import pytest

from opensearch_lightning.types import StopReason
from tests.rewards.steps import answer, call, trajectory, unreadable


@pytest.mark.parametrize("reason", StopReason)
def test_only_a_run_that_ended_by_answering_has_a_response(reason: StopReason) -> None:
    ended = replace(trajectory(call(), answer("Lyon")), stop_reason=reason)
    assert ended.response == ("Lyon" if reason is StopReason.RESPONSE else None)


def test_a_run_without_steps_has_no_response() -> None:
    assert replace(trajectory(), stop_reason=StopReason.RESPONSE).response is None


def test_turns_that_asked_for_no_tool_are_no_tool_turns() -> None:
    assert trajectory(call(), unreadable(), unreadable(), answer()).n_tool_turns == 1
