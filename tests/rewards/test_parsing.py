import json
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.rewards import parse_score, parse_verdict

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
        "0.7",
    ],
)
def test_unreadable_scores(text: str) -> None:
    assert parse_score(text) is None
