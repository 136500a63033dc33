"""Whatever JSON holds, a record gives a row or the reason why not, and never another error."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensearch_lightning.data import ImageStore, UnusableRow, parse_rl, parse_sft, short_answer
from opensearch_lightning.data.rows import sft_record, sft_row
from tests.data.rows import picture

STORE = ImageStore()
TEXTS = st.sampled_from(
    ["", "x", "<image>", "[", "[]", '{"name": "a"}', "<think>", "</think>", "\ud800", "\\boxed{x}", "/"]
)
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats()
ANY = st.recursive(
    NUMBERS | TEXTS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
IMAGES = st.sampled_from([picture(), {"bytes": picture()}, "a.png", [picture()], list(picture())])
SPEAKERS = st.sampled_from(["system", "human", "user", "gpt", "assistant", "observation", "tool", "function_call"])


def objects(*keys: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(keys, ANY), **known})


PART = objects("text", "index", "image_url", type=st.sampled_from(["text", "image", "image_url", "x"]), image=IMAGES)
CONTENT = TEXTS | st.lists(PART | TEXTS, max_size=3) | ANY
CALLS = st.lists(objects("id", name=TEXTS, arguments=ANY, function=objects("name", "arguments")), max_size=2) | ANY
TURN = objects(
    "reasoning_content", "function_call", role=SPEAKERS, content=CONTENT, value=TEXTS | ANY, tool_calls=CALLS
)
TURNS = st.lists(TURN, max_size=4)
SFT = objects("id", "system", "tools", "image", messages=TURNS | ANY, conversations=ANY, images=st.lists(IMAGES) | ANY)
RL = objects(
    *("id", "answer", "answers", "aliases", "metadata", "extra", "image_urls"),
    question=CONTENT | ANY,
    prompt=TURNS | ANY,
    images=st.lists(IMAGES) | IMAGES | ANY,
    reward_model=objects("ground_truth", "candidate_answers") | ANY,
)


@settings(max_examples=200, deadline=None)
@given(record=SFT | ANY)
def test_any_record_is_a_row_or_has_a_reason(record: Any) -> None:
    try:
        row = parse_sft(record, name="file[0]", images=STORE)
    except UnusableRow as error:
        str(error).encode()
        return
    stored, images = sft_record(row)
    assert sft_row(json.loads(json.dumps(stored, allow_nan=False)), tuple(images)) == row
    assert sum(isinstance(part, bytes) for turn in row.turns() for part in getattr(turn, "parts", ())) == len(
        row.images
    )
    assert row.conversations[0][0] == "human" and row.conversations[-1][0] == "gpt"


@settings(max_examples=200, deadline=None)
@given(record=RL | ANY)
def test_any_record_is_a_task_or_has_a_reason(record: Any) -> None:
    try:
        task = parse_rl(record, name="file[0]", images=STORE)
    except UnusableRow as error:
        str(error).encode()
        return
    assert task.question.strip() and task.answer.strip() and task.id
    json.dumps(dict(task.metadata), allow_nan=False).encode()
    assert "<image>" not in task.question


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(["\\boxed{", "}", "{", "\\", "Answer:", "**", "\n", "x", "\\text{", "<answer>"])).map(
        "".join
    )
)
def test_any_text_has_a_short_answer_or_none(text: str) -> None:
    answer = short_answer(text)
    assert answer is None or (answer == answer.strip() != "" and "\n" not in answer)


def deep() -> Any:
    value: Any = []
    for _ in range(5_000):
        value = [value]
    return value


ASKED, TOLD = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    "fields",
    [
        lambda: {"conversations": deep()},
        lambda: {"messages": [{"role": "user", "content": deep()}, TOLD]},
        lambda: {"messages": [{"role": deep(), "content": "x"}, TOLD]},
        lambda: {"messages": [ASKED, TOLD], "tools": deep()},
        lambda: {"messages": [ASKED, TOLD], "tools": [{"name": deep()}]},
        lambda: {"messages": [ASKED, {"role": "assistant", "tool_calls": deep()}]},
        lambda: {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "a", "arguments": {"b": deep()}}]}]},
        lambda: {"messages": [{"role": "user", "content": "<image>"}, TOLD], "images": deep()},
        lambda: {"conversations": 10**5000},
        lambda: {"question": "x", "answer": deep()},
        lambda: {"question": "x", "answer": 10**5000},
        lambda: {"question": "x", "answer": "y", "images": deep()},
        lambda: {"prompt": deep(), "answer": "y"},
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(fields: Any) -> None:
    for parse in (parse_sft, parse_rl):
        with pytest.raises(UnusableRow) as raised:
            parse(fields(), name="file[0]", images=STORE)
        assert len(str(raised.value)) < 400


def test_what_cannot_be_stored_is_left_out() -> None:
    record = {"id": 10**5000, "question": "x", "answer": "y", "metadata": {"a": deep()}, "n": 10**5000, "m": 1}
    task = parse_rl(record, name="file[0]", images=STORE)
    assert task.metadata == {"m": 1}
    assert parse_sft({"id": 10**5000, "messages": [ASKED, TOLD]}, name="file[0]", images=STORE).id == "file[0]"
