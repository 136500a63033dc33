import pytest

from opensearch_lightning.data import short_answer

REPORT = "## Findings\n\nThe tower stands in Lyon. " + "It was built long ago. " * 30 + "\n\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Lyon", "Lyon"),
        ("  Lyon, France. ", "Lyon, France."),
        (REPORT + r"The answer is \boxed{Lyon}.", "Lyon"),
        (REPORT + r"$$\boxed{\text{Lyon}}$$", "Lyon"),
        (REPORT + r"\boxed{\textbf{Saint-\text{É}tienne}\ \& co}", "Saint-Étienne & co"),
        (REPORT + r"\boxed{f(\{1, 2\}) = {3}}", "f({1, 2}) = {3}"),
        (REPORT + r"\boxed{$1889$}", "1889"),
        (REPORT + r"\boxed{**Lyon**}", "Lyon"),
        (REPORT + r"\boxed{\boxed{Lyon}}", "Lyon"),
        (REPORT + r"\boxed{Paris} no: \boxed{Lyon} and \boxed{}", "Lyon"),
        (REPORT + r"{ \boxed{Lyon}", "Lyon"),
        (REPORT + r"\\boxed {Lyon}", "Lyon"),
        (REPORT + "\boxed{Lyon}", "Lyon"),
        (REPORT + r"\boxed{50\%}" + "\nFinal answer: 60%", "50%"),
        (REPORT + "<answer> Lyon </answer>", "Lyon"),
        (REPORT + "<response>\nLyon\n</response>", "Lyon"),
        (REPORT + "Final answer: Lyon", "Lyon"),
        (REPORT + "**Answer:** Lyon\n\nSources: [1]", "Lyon"),
        (REPORT + "**Final Answer**: **Lyon**", "Lyon"),
        (REPORT + "**Final Answer: Lyon**", "Lyon"),
        (REPORT + "- **Short answer:** `Lyon`", "Lyon"),
        (REPORT + "### Final Answer\n\n**Lyon**\n", "Lyon"),
        (REPORT + "**Answer**\nLyon", "Lyon"),
        (REPORT + "**答案：** 里昂", "里昂"),
        (REPORT + "最终答案：里昂", "里昂"),
        ("Answer: 3 * 4", "3 * 4"),
        ("Le Grand_Hotel *", "Le Grand_Hotel *"),
        (REPORT, None),
        ("Lyon\nFrance", None),
        ("x" * 201, None),
        ("x" * 200, "x" * 200),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{Lyon", None),
        (REPORT + r"\boxed{" + "x" * 201 + "}", None),
        (REPORT + "Answer: " + "It depends. " * 40, None),
        (REPORT + "The answer is not known.", None),
    ],
)
def test_the_marked_answer_is_taken(text: str, answer: str | None) -> None:
    assert short_answer(text) == answer


def test_many_open_boxes_take_linear_time() -> None:
    assert short_answer("\\boxed{" * 200_000) is None
