import json
import string
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensearch_lightning.chat import actions, format_action, parse_action
from opensearch_lightning.errors import RenderError
from opensearch_lightning.types import Action, ErrorKind

CASES = json.loads((Path(__file__).parent / "cases" / "actions.json").read_text(encoding="utf-8"))
GOOD_CALL = '<tool_call>\n{"name": "crop", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40])
def test_action_equals_the_golden_one(case):
    expected = Action(
        **{key: value for key, value in case.items() if key not in ("text", "error")}, error=case["error"]
    )
    assert parse_action(case["text"]) == expected


def call(body: str) -> Action:
    return parse_action(f"<think>x</think>\n<tool_call>\n{body}\n</tool_call>")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        '"text_search"',
        "text_search(q='a')",
        '{"name": 3, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "crop", "arguments": null}',
        '{"name": "crop", "arguments": []}',
        '{"name": "crop", "arguments": "{}"}',
        '{"arguments": {}}',
        '[{"name": "crop", "arguments": {}}]',
        '{"name": "crop", "arguments": {}} {"name": "crop", "arguments": {}}',
        '{"name": "crop", "arguments": {}} and so on',
        '{"name": "crop", "arguments": {"x": Infinity}}',
        '{"name": "crop", "arguments": {"x": -Infinity}}',
        '{"name": "crop", "arguments": {\'x\': 1}}',
        '{"name": "crop", "arguments": {"x": 1,}}',
        '{"name": "crop", "arguments": {"q": "two\nlines"}}',
        '{"name": "crop", "arguments": {"q": "\\ud800"}}',
        '{"name": "crop", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "crop", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '```json\n{"name": "crop", "arguments": {}}\n```',
    ],
    ids=lambda body: body[:50],
)
def test_what_is_not_one_strict_json_call_is_malformed(body):
    assert call(body) == Action(kind="error", error=ErrorKind.MALFORMED_CALL)


def nested(levels: int) -> str:
    """Arguments with lists inside, so that the whole call is ``levels`` deep."""
    return '{"name": "crop", "arguments": {"x": ' + "[" * (levels - 2) + "]" * (levels - 2) + "}}"


@pytest.mark.parametrize("levels", [33, 500, 900, 990, 5_000])
def test_nesting_is_bounded(levels):
    assert call(nested(32)).kind == "tool_call"
    assert call(nested(levels)) == Action(kind="error", error=ErrorKind.MALFORMED_CALL)
    objects = '{"name": "crop", "arguments": ' + '{"x": ' * (levels - 1) + "1" + "}" * levels
    assert call(objects) == Action(kind="error", error=ErrorKind.MALFORMED_CALL)


@pytest.mark.parametrize("levels", [33, 100_000])
def test_what_is_nested_too_deep_is_not_written(levels):
    value: list = []
    for _ in range(levels - 3):
        value = [value]
    with pytest.raises(RenderError, match=r"nested .*32 levels"):
        format_action("x", call=("crop", {"x": value}))


def test_calls_behind_the_second_are_not_read(monkeypatch):
    class Counting(json.JSONDecoder):
        read = 0

        def raw_decode(self, *args):
            self.read += 1
            return super().raw_decode(*args)

    decoder = Counting()
    monkeypatch.setattr(actions, "_JSON", decoder)
    assert parse_action("<tool_call></tool_call>" * 4096).error is ErrorKind.SEVERAL_ACTIONS
    assert decoder.read == 2


def test_reading_takes_linear_time():
    def seconds(n: int) -> float:
        text, best = "<think>x</think>" * n, float("inf")
        for _ in range(3):
            started = time.perf_counter()
            assert parse_action(text).error is ErrorKind.NO_ACTION
            best = min(best, time.perf_counter() - started)
        return best

    assert seconds(32_000) < 6 * 16 * seconds(2_000)  # quadratic: 256 times as long


def test_a_call_that_is_not_closed_is_malformed():
    assert parse_action('<think>x</think><tool_call>{"name": "crop", "arguments": {}}').error == "malformed_call"
    assert parse_action('<think>x</think><tool_call>{"name": "cr').error == "malformed_call"


def test_json_decides_where_a_call_ends():
    query = '</tool_call><tool_call>{"name": "crop"}</tool_call> <think> <response>x</response> }}'
    got = call(json.dumps({"name": "text_search", "arguments": {"q": query}}))
    assert got.arguments == {"q": query}
    assert got.well_formed


def test_no_tool_is_named_by_words_in_a_query():
    got = call('{"name": "text_search", "arguments": {"q": "python snake habitat, crop image_search"}}')
    assert got.name == "text_search"


def test_a_call_with_more_than_name_and_arguments_is_readable_but_not_well_formed():
    got = call('{"name": "crop", "arguments": {}, "id": 1}')
    assert (got.kind, got.well_formed) == ("tool_call", False)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>a</think>{GOOD_CALL}{GOOD_CALL}",
        "<think>a</think><response>a</response><response>b</response>",
        f"<think>a</think><tool_call>no json</tool_call>{GOOD_CALL}",
        f"<think>a</think><response>a</response><think>b</think>{GOOD_CALL}",
    ],
)
def test_two_actions_are_several_even_when_one_is_unreadable(text):
    assert parse_action(text) == Action(kind="error", error=ErrorKind.SEVERAL_ACTIONS)


@pytest.mark.parametrize(
    "text",
    [
        GOOD_CALL,
        f"<think>a<think>b</think>{GOOD_CALL}",
        f"<think>a</think><think>b</think>{GOOD_CALL}",
        f"{GOOD_CALL}<think>a</think>",
        f"<think>a</think>{GOOD_CALL}</tool_call>",
        f"<think>a</think></think>{GOOD_CALL}",
        f"<think>a</think>{GOOD_CALL}<think>never closed",
        f"<think>a</think>{GOOD_CALL}<response>never closed",
        f"<tool_response>a</tool_response>{GOOD_CALL}",
    ],
)
def test_one_readable_action_is_carried_out_though_not_well_formed(text):
    got = parse_action(text)
    assert (got.kind, got.name, got.well_formed) == ("tool_call", "crop", False)


def test_an_empty_response_is_one():
    assert parse_action("<think></think><response> </response>") == Action(
        kind="response", response="", well_formed=True
    )


text = st.text().filter(lambda text: "\x00" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
tags = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<response>",
        "</response>",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        "<|im_end|>",
    ]
)
spiked = st.lists(tags | text, max_size=6).map("".join)
thoughts = spiked.map(lambda text: text.replace("<think>", "").replace("</think>", "")).filter(
    lambda text: "<think>" not in text and "</think>" not in text
)


@settings(deadline=None, max_examples=50)
@given(thoughts, st.text(string.ascii_lowercase + "_", min_size=1), st.dictionaries(spiked, json_values | spiked))
def test_calls_round_trip(think, name, arguments):
    got = parse_action(format_action(think, call=(name, arguments)))
    assert got == Action(kind="tool_call", name=name, arguments=arguments, well_formed=True)


@settings(deadline=None, max_examples=50)
@given(thoughts, spiked.filter(lambda text: "</response>" not in text))
def test_responses_round_trip(think, response):
    got = parse_action(format_action(think, response=response))
    assert got == Action(kind="response", response=response.strip(), well_formed=True)


@settings(deadline=None, max_examples=50)
@given(spiked)
def test_any_text_is_read_without_raising(text):
    got = parse_action(text)
    assert (got.kind == "error") == (got.error is not None)
    assert not (got.kind == "error" and got.well_formed)


def test_canonical_form():
    action = Action(kind="tool_call", name="text_search", arguments={"q": "Ødegård", "top_k": 3})
    body = '{"name": "text_search", "arguments": {"q": "Ødegård", "top_k": 3}}'
    assert format_action("x", call=action) == f"<think>x</think>\n<tool_call>\n{body}\n</tool_call>"
    assert format_action("x", response="Oslo") == "<think>x</think>\n<response>Oslo</response>"
    assert format_action(None, response="Oslo") == "<response>Oslo</response>"


def test_what_would_not_be_read_back_is_refused():
    with pytest.raises(RenderError, match="exactly one"):
        format_action("x")
    with pytest.raises(RenderError, match="exactly one"):
        format_action("x", call=("crop", {}), response="a")
    with pytest.raises(RenderError, match=r"think holds </think>"):
        format_action("a</think>b", response="c")
    with pytest.raises(RenderError, match=r"response holds </response>"):
        format_action("a", response="b</response>")
    with pytest.raises(RenderError, match=r"arguments of crop.*JSON"):
        format_action("a", call=("crop", {"x": float("nan")}))
    with pytest.raises(RenderError, match="needs a name"):
        format_action("a", call=Action(kind="error"))
