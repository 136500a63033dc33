"""From messages to the tokens of Qwen3-VL's chat template, turn by turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opensearch_lightning.chat.encoding import Segment, SegmentEncoder
from opensearch_lightning.chat.images import ImageEncoder, ImageSource
from opensearch_lightning.chat.records import (
    AssistantTurn,
    ObservationTurn,
    Part,
    Rendered,
    TokenizedSample,
    Turn,
    UserTurn,
)
from opensearch_lightning.chat.template_check import check_template
from opensearch_lightning.chat.tokens import (
    ACTION_TAGS,
    IM_END,
    IM_START,
    IMAGE_PAD,
    SYSTEM_TAGS,
    TOOL_RESPONSE,
    TOOL_RESPONSE_END,
    VISION_END,
    VISION_START,
)
from opensearch_lightning.errors import RenderError
from opensearch_lightning.types import ImageInput

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

_Encode = Callable[[ImageSource, str], ImageInput]


class ControlStringError(RenderError):
    """Tool schemas hold a control string, which the chat template would make a token of their text."""


class ChatRenderer:
    """Renders conversations to the tokens that Qwen3-VL's chat template gives, without ever re-reading them.

    A rollout is ``prompt``, then what the policy sampled, then ``observation``, and so on: what was sampled stays as
    it was sampled, and only what lies between two actions is encoded. For canonical text, free of control strings,
    the result equals ``processor.apply_chat_template`` on the whole conversation, token for token. Text from users,
    pages and tools can never become a control token.

    Args:
        processor: a processor of Qwen3-VL.
        tools_in_system: JSON schemas of the tools, put into the system turn as the template does; ``None`` leaves
            them out, for a system prompt that says itself what there is to call.
        image_cache_bytes: how much preprocessed images are kept for the next rollout of the same task.

    Raises:
        ControlStringError: if the schemas hold the text of a control token.
        RenderError: if the processor's template renders a probe conversation otherwise, naming the turn; so one that
            rewrites earlier turns (drops old reasoning, or images of tool turns) is refused.
    """

    def __init__(
        self,
        processor: Any,
        *,
        tools_in_system: Sequence[Mapping[str, Any]] | None = None,
        image_cache_bytes: int = 256 * 2**20,
    ) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._encoder = SegmentEncoder(self._tokenizer)
        self._images = ImageEncoder(processor.image_processor, cache_bytes=image_cache_bytes)
        self._tools = tuple(tools_in_system or ())
        self._im_start = self._encoder.id_of(IM_START)
        self._vision_start = self._encoder.id_of(VISION_START)
        self._vision_end = self._encoder.id_of(VISION_END)
        self._tool_response = self._encoder.id_of(TOOL_RESPONSE)
        self._tool_response_end = self._encoder.id_of(TOOL_RESPONSE_END)
        self.end_of_turn_id = self._encoder.id_of(IM_END)
        """``<|im_end|>``, which ends a policy's turn."""
        self.image_token_id = self._encoder.id_of(IMAGE_PAD)
        """``<|image_pad|>``, one for each square of merged patches."""
        self.pad_id: int = self._tokenizer.pad_token_id
        """What fills short sequences of a batch."""
        self.merge_size: int = processor.image_processor.merge_size
        """Side of the square of patches that makes one image token."""
        self.vocab_size = len(self._tokenizer)
        """Number of tokens that mean something; a model's output may be wider, and ids from here on are noise."""
        self._check_tools()
        check_template(processor, self._probe_text, self.conversation, tools=self._tools or None)

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """A renderer of the same processor whose system turns hold these tool schemas."""
        # The copy shares what is large: two tokenizers, and the images kept.
        other = copy.copy(self)
        other._tools = tuple(schemas)
        other._check_tools()
        check_template(self._processor, other._probe_text, other.conversation, tools=other._tools or None)
        return other

    def prompt(self, system: str | None, parts: Sequence[Part], *, first_image: int = 1) -> Rendered:
        """System turn, user turn and the header of the policy's first turn.

        Args:
            system: the system prompt; think and tool tags in it become tokens. ``None``: no system turn, unless the
                tools need one.
            parts: texts and pictures of the question, in order.
            first_image: number of the first picture.
        """
        images = self._encode_parts(parts, first_image)
        segments = [*self._system_segments(system), *self._user_segments(parts, images), *self._header("assistant")]
        return Rendered(token_ids=self._encoder.encode(segments), images=images)

    def observation(self, text: str, images: Sequence[ImageSource] = (), *, first_image: int = 1) -> Rendered:
        """What lies between the ``<|im_end|>`` that the policy sampled and its next token.

        Args:
            text: what the tool says.
            images: what it shows, attached behind the text in the same turn.
            first_image: number of the first picture.
        """
        parts: list[Part] = [text, *images]
        encoded = self._encode_parts(parts, first_image)
        segments = ["\n", *self._observation_segments(parts, encoded), *self._header("assistant")]
        return Rendered(token_ids=self._encoder.encode(segments), images=encoded)

    def action(self, text: str) -> list[int]:
        """Ids of a policy's turn. Think and tool-call tags are tokens; any other control string is plain text."""
        return self._encoder.encode(self._encoder.split(text, ACTION_TAGS))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, tags included, ``<|im_end|>`` left out."""
        kept = [int(i) for i in token_ids if int(i) != self.end_of_turn_id]
        return self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_image(self, image: ImageSource, name: str) -> ImageInput:
        """One picture as the policy sees it, kept by content for the next call.

        Raises:
            RenderError: if it is no readable image, or the processor refuses its shape.
        """
        return self._images.encode(image, name)

    def conversation(self, system: str | None, turns: Sequence[Turn]) -> TokenizedSample:
        """A whole conversation, such as an expert's, with the tokens of the policy marked by step.

        The newline that the template puts behind the last turn is kept, so the ids are the template's.

        Raises:
            RenderError: if there is no turn, or an image cannot be used.
        """
        if not turns:
            raise RenderError("no turn to render: give at least one")
        token_ids = self._encoder.encode(self._system_segments(system))
        step_ids = [-1] * len(token_ids)
        images: list[ImageInput] = []
        step = 0
        for turn, segments in self._turns(turns, images):
            ids = self._encoder.encode(segments)
            if not isinstance(turn, AssistantTurn):
                token_ids += ids
                step_ids += [-1] * len(ids)
                continue
            said = [*self.action(turn.text), self.end_of_turn_id]
            end = self._encoder.encode(["\n"])
            token_ids += ids + said + end
            step_ids += [-1] * len(ids) + [step] * len(said) + [-1] * len(end)
            step += 1
        return TokenizedSample(
            token_ids=torch.tensor(token_ids, dtype=torch.long),
            step_ids=torch.tensor(step_ids, dtype=torch.long),
            images=tuple(images),
        )

    def length(self, system: str | None, turns: Sequence[Turn]) -> int:
        """Number of tokens of :meth:`conversation`, found without making the patches of its images.

        Raises:
            RenderError: as :meth:`conversation`, except that broken pixels may pass.
        """
        if not turns:
            raise RenderError("no turn to render: give at least one")
        n_tokens = len(self._encoder.encode(self._system_segments(system)))
        for turn, segments in self._turns(turns, [], self._images.place):
            n_tokens += len(self._encoder.encode(segments))
            if isinstance(turn, AssistantTurn):
                n_tokens += len(self.action(turn.text)) + len(self._encoder.encode(self._footer()))
        return n_tokens

    def _turns(
        self, turns: Sequence[Turn], images: list[ImageInput], encode: _Encode | None = None
    ) -> Iterator[tuple[Turn, list[Segment]]]:
        """Each turn with its segments; of an assistant turn only the header. Fills ``images``."""
        for i, turn in enumerate(turns):
            if isinstance(turn, AssistantTurn):
                yield turn, self._header("assistant")
                continue
            encoded = self._encode_parts(turn.parts, len(images) + 1, encode)
            images += encoded
            if isinstance(turn, UserTurn):
                yield turn, self._user_segments(turn.parts, encoded)
                continue
            opens = i == 0 or not isinstance(turns[i - 1], ObservationTurn)
            closes = i + 1 == len(turns) or not isinstance(turns[i + 1], ObservationTurn)
            yield turn, self._observation_segments(turn.parts, encoded, opens=opens, closes=closes)

    def _probe_text(self, system: str, turns: Sequence[Turn]) -> list[str]:
        """What the template should write for the system turn and each turn, with one pad an image."""
        texts = [self._encoder.text_of(self._system_segments(system))]
        for turn, segments in self._turns(turns, []):
            text = self._encoder.text_of(_one_pad_each(segments, self.image_token_id))
            texts.append(text + turn.text + IM_END + "\n" if isinstance(turn, AssistantTurn) else text)
        return texts

    def _check_tools(self) -> None:
        written = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self._tools)
        held = sorted(name for name in self._encoder.control_ids if name in written)
        if held:
            raise ControlStringError(
                f"the tool schemas hold the control strings {held}, which the chat template would turn into tokens; "
                "word the schemas otherwise, or leave them out of the system turn"
            )

    def _header(self, role: str) -> list[Segment]:
        return [self._im_start, f"{role}\n"]

    def _footer(self) -> list[Segment]:
        return [self.end_of_turn_id, "\n"]

    def _system_segments(self, system: str | None) -> list[Segment]:
        if system is None and not self._tools:
            return []
        body = self._encoder.split(system or "", SYSTEM_TAGS)
        if self._tools:
            if system is not None:
                body.append("\n\n")
            schemas = [f"\n{json.dumps(schema, ensure_ascii=False)}" for schema in self._tools]
            body += [_TOOLS_HEAD, *schemas, *self._encoder.split(_TOOLS_FOOT, SYSTEM_TAGS)]
        return [*self._header("system"), *body, *self._footer()]

    def _user_segments(self, parts: Sequence[Part], images: Sequence[ImageInput]) -> list[Segment]:
        return [*self._header("user"), *self._content(parts, images), *self._footer()]

    def _observation_segments(
        self, parts: Sequence[Part], images: Sequence[ImageInput], *, opens: bool = True, closes: bool = True
    ) -> list[Segment]:
        head: list[Segment] = self._header("user") if opens else ["\n"]
        body = [self._tool_response, "\n", *self._content(parts, images), "\n", self._tool_response_end]
        return [*head, *body, *(self._footer() if closes else [])]

    def _content(self, parts: Sequence[Part], images: Sequence[ImageInput]) -> list[Segment]:
        segments: list[Segment] = []
        waiting = iter(images)
        for part in parts:
            if isinstance(part, str):
                segments.append(part)
                continue
            t, h, w = next(waiting).grid_thw
            pads = [self.image_token_id] * (t * h * w // self.merge_size**2)
            segments += [self._vision_start, *pads, self._vision_end]
        return segments

    def _encode_parts(
        self, parts: Sequence[Part], first_image: int, encode: _Encode | None = None
    ) -> tuple[ImageInput, ...]:
        encode = encode or self.encode_image
        pictures = [part for part in parts if not isinstance(part, str)]
        return tuple(encode(picture, f"img_{first_image + i}") for i, picture in enumerate(pictures))


def _one_pad_each(segments: Sequence[Segment], pad: int) -> list[Segment]:
    return [segment for i, segment in enumerate(segments) if segment != pad or segments[i - 1] != pad]
