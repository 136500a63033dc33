import json
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.rewards import parse_score, parse_verdict
from opensearch_lightning.rewards.parsing import parse_object, unwrapped

CASES = Path(__file__).parent / "cases"


def golden(name: str) -> list[Any]:
    return json.loads((CASES / name).read_text())


@pytest.mark.parametrize("case", golden("judge_verdicts.json"), ids=lambda case: repr(case["text"]))
def test_golden_verdicts(case: dict[str, Any]) -> None:
    assert parse_verdict(case["text"]) is case["correct"]


@pytest.mark.parametrize("case", golden("query_scores.json"), ids=lambda case: repr(case["text"]))
def test_golden_scores(case: dict[str, Any]) -> None:
    assert parse_score(case["text"]) == case["score"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("reasoning: the year is wrong\ncorrect: no", False),
        ("The answer is not correct in spelling.\ncorrect: yes", True),
        ("correct: yes, the same person", True),
        ("correct: yes.", True),
        ("- correct: yes", True),
        ("correct = false", False),
        ('```json\n{"correct": true, "reasoning": "x"}\n```', True),
        ('{"correct": false}', False),
        ("Correct", True),
        ("No.", False),
        ("yes", True),
    ],
)
def test_readable_verdicts(text: str, verdict: bool) -> None:
    assert parse_verdict(text) is verdict


@pytest.mark.parametrize(
    "text",
    [
        "correct: no idea",
        "correct: yes or no",
        "correct: yes / no",
        "correct: 'yes' / 'no'",
        "correct: yes|no",
        "correct: nobody",
        "correct: maybe",
        "correct:",
        "correct: yes\ncorrect: no",
        "correct: yes\ncorrect: unsure",
        '{"correct": "maybe"}',
        '{"correct": 3}',
        "yes and no",
        "It cannot be said that the response is correct.",
    ],
)
def test_unreadable_verdicts(text: str) -> None:
    assert parse_verdict(text) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("reasoning: two hits\nscore: 0.5", 0.5),
        ("score: 70%", 0.7),
        ("score: 7 out of 10.", 0.7),
        ("score: 0.7 (good)", 0.7),
        ("score: 0.7.", 0.7),
        ("score: .5", 0.5),
        ("score: 0", 0.0),
        ('{"score": "3/4"}', 0.75),
        ('{"score": 1}', 1.0),
        ("score: 0.5\nscore: 0.5", 0.5),
    ],
)
def test_readable_scores(text: str, score: float) -> None:
    assert parse_score(text) == score


@pytest.mark.parametrize(
    "text",
    [
        "score: 0.0-1.0",
        "score: 0 to 1",
        "score: [0, 1]",
        "score: 11/10",
        "score: 1/0",
        "score: nan",
        "score: inf",
        "score: 1e9",
        "score: 0.2\nscore: 0.3",
        '{"score": true}',
        '{"score": 7}',
        '{"score": null}',
        '{"score": NaN}',
        '{"score": 1' + "0" * 400 + "}",
        '{"score": ' + "[" * 100_000 + "}",
        "0.7",
    ],
)
def test_unreadable_scores(text: str) -> None:
    assert parse_score(text) is None


def test_an_object_and_nothing_else() -> None:
    assert parse_object(' {"a": {"b": [1, 0.5, null]}}\n') == {"a": {"b": [1, 0.5, None]}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prose",
        "[]",
        "null",
        '{"a": 1} so',
        'So: {"a": 1}',
        '{"a": 1}{"a": 1}',
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1',
        '{"a":' + "[" * 100_000,
    ],
)
def test_what_is_no_single_object(text: str) -> None:
    assert parse_object(text) is None


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (' {"a": "</think>"} ', '{"a": "</think>"}'),
        ("<think>x</think>\n\nyes", "yes"),
        ("x</think> yes", "yes"),
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ("<think>```x```</think>```\nyes\n```", "yes"),
        ("```yes```", "```yes```"),
        ("yes", "yes"),
    ],
)
def test_reasoning_and_fences_go(text: str, bare: str) -> None:
    assert unwrapped(text) == bare


@pytest.mark.parametrize(
    "text",
    [
        '{"correct": false, "correct": true}',
        'correct: yes\n{"correct": false}',
        'Correct: no, the answer {"correct": true} is wrong',
    ],
)
def test_verdicts_that_differ_in_and_beside_an_object_are_none(text: str) -> None:
    assert parse_verdict(text) is None


def test_a_score_given_twice_is_none() -> None:
    assert parse_score('{"score": 0.2, "score": 1}') is None
    assert parse_verdict('correct: yes\n{"correct": true}') is True
