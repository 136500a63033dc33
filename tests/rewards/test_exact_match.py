import pytest

from opensearch_lightning.rewards import ExactMatchJudge, normalize_answer
from opensearch_lightning.types import Task


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,234", "1234"),
        ("12,345,678 people", "12345678 people"),
        ("1'234", "1234"),
        ("1\u202f234", "1234"),
        ("The Louvre", "louvre"),
        ("An  old\ttown.", "old town"),
        ("ＡＤＡ Ｑuist", "Ada Quist"),
        ("ﬁnch", "finch"),
        ("STRASSE", "straße"),
        ("“Velmora”!", "Velmora"),
        ("Saint-Denis", "Saint Denis"),
        ("U.S.A.", "USA"),
        ("5 %", "5 percent"),
        ("−5", "-5"),
        ("3.5.", "3.5"),
    ],
)
def test_spellings_of_one_answer(one: str, other: str) -> None:
    assert normalize_answer(one) == normalize_answer(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3.5", "35"),
        ("-5", "5"),
        ("1,23", "123"),
        ("12,34", "1234"),
        ("1234", "12 34"),
        ("Zürich", "Zurich"),
        ("Theodor", "odor"),
        ("$5", "5"),
        ("1982", "1983"),
    ],
)
def test_different_answers_stay_different(one: str, other: str) -> None:
    assert normalize_answer(one) != normalize_answer(other)


def test_single_letter_answers_survive_the_articles() -> None:
    assert normalize_answer("A") == "a"
    assert normalize_answer("vitamin A") == "vitamin a"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("ada quist", True),
        ("A. Quist", True),
        ("Ada Quist is the mayor", False),
        ("", False),
        ("...", False),
    ],
)
async def test_answer_and_aliases_match(response: str, right: bool) -> None:
    task = Task(id="t", question="Who?", answer="Ada Quist", aliases=("A. Quist", "!"), images=())
    assert await ExactMatchJudge().judge(task.question, response, task) is right
