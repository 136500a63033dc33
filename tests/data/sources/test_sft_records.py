import base64
import json
import re
from typing import Any

import pytest

from opensearch_lightning.chat import parse_action
from opensearch_lightning.data import DropReason, ImageStore, SFTRow, UnusableRow, parse_sft
from tests.data.rows import SYSTEM, answer, call, conversation, picture, row
from tests.data.sources.test_sharegpt_rows import labels

STORE = ImageStore()


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NO_THINK = written("crop", '{"box": [1, 2.5], "why": "é"}')
CROP = {"name": "crop", "arguments": {"box": [1, 2.5], "why": "é"}}


def parse(record: Any) -> SFTRow:
    return parse_sft(record, name="file[0]", images=STORE)


def refusal(record: Any) -> tuple[DropReason, str]:
    with pytest.raises(UnusableRow) as raised:
        parse(record)
    return raised.value.reason, str(raised.value)


def messages(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(turns), **fields}


def user(content: Any = "Q") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any = "seen") -> dict[str, Any]:
    return {"role": "tool", "content": content}


def test_each_spelling_of_a_conversation_gives_the_same_row() -> None:
    expected = parse(row(3))
    turns = row(3)["conversations"]
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    as_messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
    rest = {"id": "row-3", "images": [picture(3)]}
    system = {"role": "system", "content": SYSTEM}
    for record in (
        {**rest, "messages": as_messages, "system": SYSTEM},
        {**rest, "messages": [system, *as_messages]},
        {**rest, "messages": [system, *as_messages], "system": SYSTEM},
        {**rest, "conversations": as_messages, "messages": None, "system": SYSTEM, "tools": None},
        {**rest, "conversations": [{"from": "system", "value": SYSTEM}, *turns]},
        {**rest, "system": SYSTEM, "conversations": {key: [t[key] for t in turns] for key in ("from", "value")}},
        {**rest, "messages": [{**turn, "tool_calls": None, "from": None} for turn in [system, *as_messages]]},
    ):
        assert parse(record) == expected


def test_parts_hold_texts_and_images_where_they_stand() -> None:
    content = [
        {"type": "text", "text": "Compare ", "image": None},
        {"type": "image", "image": picture(1)},
        " and ",
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture(2)).decode()}},
    ]
    observed = [{"type": "image", "bytes": picture(3)}, {"type": "text", "text": "crop"}]
    parsed = parse(
        messages(user(content), assistant(), tool(observed), assistant([{"type": "text", "text": "a"}, "b"]))
    )
    assert [text for _, text in parsed.conversations] == ["Compare <image> and <image>", "ok", "<image>crop", "ab"]
    assert parsed.images == (picture(1), picture(2), picture(3))


@pytest.mark.parametrize(
    ("parts", "shades"),
    [
        ([{"type": "image"}, {"type": "text", "text": "Q"}, {"type": "image", "text": None}], (1, 2)),
        ([{"type": "image", "index": 1}, {"type": "image", "index": 0}], (2, 1)),
        (["<image>", {"type": "image"}], (1, 2)),
    ],
)
def test_parts_without_an_image_take_the_columns(parts: list[Any], shades: tuple[int, ...]) -> None:
    parsed = parse(messages(user(parts), assistant(), images=[picture(1), {"bytes": picture(2), "path": "x"}]))
    assert parsed.images == tuple(map(picture, shades))
    assert [image for turn in parsed.turns()[:1] for image in turn.parts if isinstance(image, bytes)] == [
        *parsed.images
    ]


def test_placeholders_in_assistant_and_system_texts_are_text() -> None:
    parsed = parse(
        messages(
            user("<image>Q"), assistant("see ![x](<image>)"), images=[picture()], system="Images stand as <image>."
        )
    )
    assert labels(parsed) == ["see ![x](<image>)"]
    assert parsed.images == (picture(),)
    assert parsed.system == "Images stand as <image>."


def test_assistant_text_is_taught_as_it_stands() -> None:
    texts = ["<think></think>\n\n x ", "<think>\n\n</think>\n" + call("y"), '<tool_call>\n{"name": broken', answer("z")]
    turns = [turn for text in texts for turn in (("human", "Q"), ("gpt", text))]
    assert labels(parse({"conversations": conversation(*turns)})) == texts


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_calls": [{"id": "1", "type": "function", "function": CROP}]}, NO_THINK),
        ({"tool_calls": [{"function": {"name": "crop", "arguments": json.dumps(CROP["arguments"])}}]}, NO_THINK),
        ({"tool_calls": [CROP]}, NO_THINK),
        ({"tool_calls": json.dumps([CROP])}, NO_THINK),
        ({"function_call": {**CROP, "arguments": json.dumps(CROP["arguments"])}}, NO_THINK),
        ({"tool_calls": [CROP], "reasoning_content": "Look."}, "<think>Look.</think>\n" + NO_THINK),
        ({"tool_calls": [CROP], "reasoning_content": "  "}, NO_THINK),
        ({"tool_calls": [CROP], "content": "<think>Look.</think>"}, "<think>Look.</think>\n" + NO_THINK),
        (
            {"tool_calls": [CROP], "content": "<think>Look.</think>", "reasoning_content": "Look."},
            "<think>Look.</think>\n" + NO_THINK,
        ),
        ({"tool_calls": [CROP, CROP], "content": "I crop."}, f"I crop.\n{NO_THINK}\n{NO_THINK}"),
        ({"tool_calls": [], "content": "x", "reasoning_content": "Look."}, "<think>Look.</think>\nx"),
        ({"tool_calls": None, "content": " x\n", "reasoning_content": None}, " x\n"),
        ({"tool_calls": [{"name": "crop", "arguments": ""}]}, written("crop", "{}")),
        ({"tool_calls": [{"name": "a", "arguments": {"q": "x", "box": None}}]}, written("a", '{"q": "x"}')),
    ],
)
def test_structured_calls_become_the_text_to_learn(fields: dict[str, Any], text: str) -> None:
    parsed = parse(messages(user(), {"role": "assistant", "content": None, **fields}, tool(), assistant()))
    assert parsed.conversations[1] == ("gpt", text)
    assert labels(parsed) == [text, "ok"]


def test_a_written_call_is_read_back() -> None:
    parsed = parse(messages(user(), assistant("", tool_calls=[CROP], reasoning_content="Look."), tool(), assistant()))
    action = parse_action(parsed.conversations[1][1])
    assert action.well_formed and (action.name, action.arguments) == ("crop", CROP["arguments"])


@pytest.mark.parametrize("value", [json.dumps(CROP), json.dumps([CROP]), "<think> </think>" + json.dumps(CROP), CROP])
def test_function_call_turns_are_the_policys(value: Any) -> None:
    turns = [*conversation(("human", "Q")), {"from": "function_call", "value": value}]
    turns += conversation(("observation", "1"), ("observation", "2"), ("gpt", "ok"))
    parsed = parse({"conversations": turns})
    assert [speaker for speaker, _ in parsed.conversations] == ["human", "gpt", "observation", "observation", "gpt"]
    assert labels(parsed) == [NO_THINK, "ok"]


def test_a_function_call_turn_keeps_its_thinking() -> None:
    value = "<think>Look.</think>\n" + json.dumps(CROP)
    parsed = parse(
        {"conversations": conversation(("human", "Q"), ("function_call", value), ("observation", "x"), ("gpt", "y"))}
    )
    assert parsed.conversations[1][1] == "<think>Look.</think>\n" + NO_THINK


def test_tools_are_kept_as_they_stand() -> None:
    schema = {"type": "function", "function": {"name": "crop", "parameters": {"b": None, "a": [1.0]}}}
    for tools in ([schema], json.dumps([schema])):
        assert json.dumps(parse(messages(user(), assistant(), tools=tools)).tools) == json.dumps([schema])


@pytest.mark.parametrize(
    ("record", "id_"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"id": None, "data_id": "d"}, "d"),
        ({"id": [1]}, "file[0]"),
        ({}, "file[0]"),
    ],
)
def test_ids_are_the_records_or_its_place(record: dict[str, Any], id_: str) -> None:
    assert parse(messages(user(), assistant(), **record)).id == id_


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        (None, DropReason.BAD_RECORD, "a row is an object, got NoneType"),
        (
            messages({"role": "system", "content": "a"}, user(), assistant(), system="b"),
            DropReason.TWO_SYSTEM_PROMPTS,
            "'a'.*'b'",
        ),
        (messages(user(), {"role": "system", "content": "a"}, assistant()), DropReason.TURN_ORDER, "system"),
        (messages(user(), assistant(), user()), DropReason.ENDS_WITHOUT_POLICY, "from human"),
        (messages(user(), assistant(), tool()), DropReason.ENDS_WITHOUT_POLICY, "from observation"),
        (messages(user(), assistant("")), DropReason.EMPTY_POLICY_TURN, "empty"),
        (messages(user(), assistant("", reasoning_content=" ")), DropReason.EMPTY_POLICY_TURN, "empty"),
        (messages(user(), assistant(None)), DropReason.BAD_RECORD, "a text or a list of parts, got None"),
        (messages(user([{"type": "video", "video": "x"}]), assistant()), DropReason.BAD_RECORD, "video"),
        (messages(user(), assistant([{"type": "image", "image": picture()}])), DropReason.BAD_RECORD, "image stands"),
        (messages(user([{"type": "image"}]), assistant()), DropReason.IMAGE_COUNT, "1 placeholders.*0 images"),
        (
            messages(user(["a <image> tag", {"type": "image", "image": picture()}]), assistant()),
            DropReason.IMAGE_COUNT,
            "2",
        ),
        (messages(user(["<ima", "ge>"]), assistant()), DropReason.IMAGE_COUNT, "where they meet"),
        (
            messages(user([{"type": "image", "image": picture()}]), assistant(), images=[picture()]),
            DropReason.IMAGE_COUNT,
            "",
        ),
        (
            messages(user([{"type": "image", "index": 0}] * 2), assistant(), images=[picture()] * 2),
            DropReason.IMAGE_COUNT,
            "",
        ),
        (messages(user([{"type": "image", "index": -1}]), assistant(), images=[picture()]), DropReason.IMAGE_COUNT, ""),
        (messages(user(), assistant(tool_calls=[{"name": "x", "arguments": "{"}])), DropReason.BAD_CALL, "no JSON"),
        (messages(user(), assistant(tool_calls=[{"name": "x", "arguments": "[]"}])), DropReason.BAD_CALL, "an object"),
        (messages(user(), assistant(tool_calls=[{"name": 3}])), DropReason.BAD_CALL, "a name"),
        (messages(user(), assistant(tool_calls={"name": "x"})), DropReason.BAD_CALL, "a list"),
        (
            messages(user(), assistant(tool_calls=[{"name": "x", "arguments": {"a": float("nan")}}])),
            DropReason.BAD_CALL,
            "",
        ),
        (messages(user(), assistant(call("x"), tool_calls=[CROP])), DropReason.BAD_CALL, "in its text"),
        (
            messages(user(), assistant("<think>a</think>", reasoning_content="b")),
            DropReason.BAD_RECORD,
            "other reasoning",
        ),
        (messages(user(), assistant("x", reasoning_content="a</think>b")), DropReason.BAD_RECORD, "tag"),
        (
            {"conversations": conversation(("human", "Q"), ("function_call", "not json"))},
            DropReason.BAD_CALL,
            "no JSON",
        ),
        ({"conversations": conversation(("human", "Q"), ("function_call", "[]"))}, DropReason.BAD_CALL, "no call"),
        (
            {"conversations": conversation(("human", "Q"), ("gpt", "I call"), ("function_call", json.dumps(CROP)))},
            DropReason.TURN_ORDER,
            "gpt is followed by one from gpt",
        ),
        (messages(user(), assistant("\ud800")), DropReason.BAD_TEXT, "turn"),
    ],
)
def test_unusable_records_say_why(record: Any, reason: DropReason, message: str) -> None:
    found, said = refusal(record)
    assert found is reason
    assert re.search(message, said), said
