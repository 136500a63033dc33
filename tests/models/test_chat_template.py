"""The template against Qwen3-VL's own text, written out by hand, and against the copy that TRL carries."""

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import tiny_processor

TOOLS = [{"type": "function", "function": {"name": "crop", "description": "<Æ> & 'b'", "parameters": {"x": [1, None]}}}]
IMAGE, VIDEO = {"type": "image", "image": "a.png"}, {"type": "video", "video": "a.mp4"}
CALLS = [
    {"function": {"name": "crop", "arguments": {"image": "img_1", "é": [1.5, True]}}},
    {"name": "sharpen", "arguments": '{"image": "img_1"}'},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <short>."},
    {
        "role": "user",
        "content": [IMAGE, {"type": "text", "text": "What's"}, VIDEO, {"image_url": "x"}, {"text": " it?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "<think>a</think>"}], "tool_calls": CALLS},
    {"role": "tool", "content": [{"type": "text", "text": "img_2:"}, IMAGE]},
    {"role": "tool", "content": "plain"},
    {"role": "assistant", "content": "", "tool_calls": CALLS[1:]},
    {"role": "tool", "content": [VIDEO]},
    {"role": "assistant", "content": "<think>b</think>\n<response>c</response>"},
    {"role": "user", "content": "again"},
]
CONVERSATIONS = [
    MESSAGES,
    MESSAGES[1:],
    MESSAGES[:2],
    MESSAGES[3:],
    MESSAGES[2:4],
    [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *MESSAGES[1:2]],
]


def render(template, messages, **options):
    return tiny_processor().apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def test_text_by_hand():
    got = render(None, MESSAGES, tools=TOOLS, add_generation_prompt=True)
    schema = json.dumps(TOOLS[0], ensure_ascii=False)
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    film = "<|vision_start|><|video_pad|><|vision_end|>"
    assert got == (
        "<|im_start|>system\nBe <short>.\n\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        + schema
        + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
        f"<|im_start|>user\n{shown}What's{film}{shown} it?<|im_end|>\n"
        '<|im_start|>assistant\n<think>a</think>\n<tool_call>\n{"name": "crop", "arguments": {"image": "img_1", '
        '"é": [1.5, true]}}\n</tool_call>\n<tool_call>\n{"name": "sharpen", "arguments": {"image": "img_1"}}\n'
        "</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nimg_2:{shown}\n</tool_response>\n<tool_response>\nplain\n"
        "</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "sharpen", "arguments": {"image": "img_1"}}\n'
        "</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{film}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>b</think>\n<response>c</response><|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.skipif(
    find_spec("trl") is None, reason="compares with the Qwen3-VL template that TRL carries: install trl"
)
def test_text_equals_that_of_trls_copy():
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    theirs = Path(spec.submodule_search_locations[0], "chat_templates", "qwen3_vl.jinja").read_text(encoding="utf-8")
    for messages, tools, header, numbered in product(CONVERSATIONS, [None, TOOLS], [False, True], [False, True]):
        options = {"tools": tools, "add_generation_prompt": header, "add_vision_id": numbered}
        assert render(None, messages, **options) == render(theirs, messages, **options)
