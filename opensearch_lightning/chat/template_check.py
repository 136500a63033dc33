"""Whether a processor's chat template is one that rollouts can be trained under.

A rollout appends turns and never touches earlier ones, so a template must write each turn the same however many
follow, and as the renderer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from PIL import Image

from opensearch_lightning.chat.records import (
    AssistantTurn,
    ObservationTurn,
    Part,
    TokenizedSample,
    Turn,
    UserTurn,
)
from opensearch_lightning.errors import RenderError

_SYSTEM = "Answer with the tools."
_CALL = '<think>Look at part {0}.</think>\n<tool_call>\n{{"name": "crop", "arguments": {{"x": {0}}}}}\n</tool_call>'


def check_template(
    processor: Any,
    expected_texts: Callable[[str, Sequence[Turn]], list[str]],
    tokenize: Callable[[str, Sequence[Turn]], TokenizedSample],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Render a probe conversation with the processor's template and compare it with the renderer's own.

    Args:
        processor: whose template is checked.
        expected_texts: text of the system turn and of each turn.
        tokenize: the tokens of the whole.
        tools: schemas in the system turn.

    Raises:
        RenderError: naming the turn that comes out otherwise, and how.
    """
    turns = _probe()
    messages = [{"role": "system", "content": _SYSTEM}, *map(_message, turns)]
    expected = expected_texts(_SYSTEM, turns)
    n_confirmed = 0
    for n in range(2, len(messages) + 1):
        # Tool turns in a row share a header and a footer, so a cut between two of them is no conversation's text.
        if n == len(messages) or not messages[n]["role"] == messages[n - 1]["role"] == "tool":
            _compare(_template(processor, messages[:n], tools), expected[:n], messages, n_confirmed)
            n_confirmed = n
    header = _template(processor, messages[:2], tools, add_generation_prompt=True)
    if header != "".join(expected[:2]) + "<|im_start|>assistant\n":
        raise RenderError(f"the chat template opens the policy's turn otherwise than Qwen3-VL's: {header[-60:]!r}")
    features = _template(processor, messages, tools, tokenize=True, return_dict=True)
    _compare_ids(features, processor, tokenize(_SYSTEM, turns))


def _probe() -> list[Turn]:
    wide, tall = Image.new("RGB", (96, 64), (200, 30, 30)), Image.new("RGB", (64, 96), (30, 30, 200))
    return [
        UserTurn(parts=[wide, "What is it?"]),
        AssistantTurn(text=_CALL.format(1)),
        ObservationTurn(parts=["img_2: 64x96 pixels.", tall]),
        AssistantTurn(text=_CALL.format(2)),
        ObservationTurn(parts=["Nothing."]),
        ObservationTurn(parts=["A page."]),
        AssistantTurn(text="<think>It is clear.</think>\n<response>Red.</response>"),
        UserTurn(parts=["And now?"]),
        AssistantTurn(text="<think>The same.</think>\n<response>Red.</response>"),
    ]


def _message(turn: Turn) -> dict[str, Any]:
    if isinstance(turn, AssistantTurn):
        return {"role": "assistant", "content": [{"type": "text", "text": turn.text}]}
    role = "user" if isinstance(turn, UserTurn) else "tool"
    return {"role": role, "content": [_content(part) for part in turn.parts]}


def _content(part: Part) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


def _template(
    processor: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **options: Any
) -> Any:
    try:
        return processor.apply_chat_template(messages, tools=tools, **{"tokenize": False, **options})
    except (TemplateError, ValueError) as error:
        raise RenderError(
            f"the chat template cannot render the probe: {error}; use a processor with Qwen3-VL's template"
        ) from error


def _compare(got: str, expected: Sequence[str], messages: Sequence[Mapping[str, Any]], n_confirmed: int) -> None:
    last = len(expected) - 1
    start = 0
    for i, text in enumerate(expected):
        found = got[start : start + len(text)] if i < last else got[start:]
        if found != text:
            what = f"renders turn {i} ({messages[i]['role']}) otherwise than Qwen3-VL's"
            if i < n_confirmed:
                what = f"rewrites turn {i} ({messages[i]['role']}) once turn {last} ({messages[last]['role']}) follows"
            raise RenderError(
                f"the chat template {what}: got {found!r}, needed {text!r}. Rollouts only append; use a processor "
                "with Qwen3-VL's template, which keeps every turn as it was"
            )
        start += len(text)


def _compare_ids(features: Mapping[str, Any], processor: Any, sample: TokenizedSample) -> None:
    got, needed = list(features["input_ids"][0]), sample.token_ids.tolist()
    if got != needed:
        at = next(i for i, (a, b) in enumerate(zip_longest(got, needed)) if a != b)
        window = slice(max(at - 3, 0), at + 3)
        raise RenderError(
            f"the processor tokenizes the probe otherwise than the renderer from token {at} on: "
            f"{processor.tokenizer.decode(got[window])!r} against {processor.tokenizer.decode(needed[window])!r}; "
            "a fast Qwen3-VL tokenizer is needed"
        )
