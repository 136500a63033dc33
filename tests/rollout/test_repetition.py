import pytest

from opensearch_lightning.rollout.repetition import repeated_call_onset, repeats_ngram
from opensearch_lightning.types import Action, ErrorKind, Step, ToolResult


def step(index: int, arguments: dict[str, object], error: ErrorKind | None = None) -> Step:
    action = Action(kind="tool_call", name="crop", arguments=arguments, well_formed=True)
    return Step(index=index, text="", action=action, result=ToolResult(tool="crop", text="", error=error))


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 20, True),
        ([1, 2, 3] * 6, True),
        ([9, 8, *([1, 2, 3] * 6)], True),
        ([1, 2, 3] * 3, False),
        (list(range(60)), False),
        # a long turn that ends in a short list is not a loop
        ([*range(40), 5, 5, 5, 5], False),
        ([], False),
    ],
)
def test_ngram_loop(tokens: list[int], loops: bool) -> None:
    assert repeats_ngram(tokens) is loops


def test_equal_calls_in_a_row_are_fatal_from_the_first() -> None:
    steps = [step(0, {"x": 1}), step(1, {"x": 2, "y": 0}), step(2, {"y": 0, "x": 2}), step(3, {"x": 2, "y": 0})]
    assert repeated_call_onset(steps, 3) == 1
    assert repeated_call_onset(steps, 4) is None
    assert repeated_call_onset(steps[:3], 3) is None


def test_trying_a_failed_call_again_is_no_repetition() -> None:
    steps = [step(0, {}, ErrorKind.TIMEOUT), step(1, {}, ErrorKind.TIMEOUT), step(2, {})]
    assert repeated_call_onset(steps, 3) is None
