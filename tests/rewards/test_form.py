import pytest

from opensearch_lightning.rewards import format_reward
from opensearch_lightning.types import ErrorKind, Step
from tests.rewards.steps import answer, call, unreadable


@pytest.mark.parametrize(
    ("steps", "reward"),
    [
        ([answer()], 1.0),
        ([call(), answer()], 1.0),
        ([call(well_formed=False), answer()], 0.5),
        ([call(), answer(well_formed=False)], 0.5),
        ([call(error=ErrorKind.TIMEOUT), call(), call(), answer()], 0.75),
        ([unreadable(), answer()], 0.5),
        ([call(), call()], 0.5),  # the last step should have answered
        ([answer(), answer()], 0.5),  # a response before the last step
        ([], 0.0),
    ],
)
def test_mean_over_steps(steps: list[Step], reward: float) -> None:
    assert format_reward(steps) == reward


def test_every_step_of_a_prefix_is_a_call() -> None:
    assert format_reward([call(), call()], complete=False) == 1.0
    assert format_reward([call(), answer()], complete=False) == 0.5
    assert format_reward([], complete=False) == 0.0
