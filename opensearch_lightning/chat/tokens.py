"""The control tokens of Qwen3-VL, by name and in the order of its tokenizer.

A tokenizer gives the first fourteen the flag "special"; the others are ordinary added tokens. Both kinds become one id
wherever the tokenizer meets their text, so neither may be looked for in text from outside.
"""

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
TOOL_RESPONSE = "<tool_response>"
TOOL_RESPONSE_END = "</tool_response>"
THINK = "<think>"
THINK_END = "</think>"

SPECIAL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_PAD,
    VIDEO_PAD,
)
"""Tokens with the flag "special"."""

ADDED_TOKENS = (
    TOOL_CALL,
    TOOL_CALL_END,
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    TOOL_RESPONSE,
    TOOL_RESPONSE_END,
    THINK,
    THINK_END,
)
"""Added tokens without that flag."""

CONTROL_TOKENS = SPECIAL_TOKENS + ADDED_TOKENS
"""All of them, in the order of their ids."""

ACTION_TAGS = (THINK, THINK_END, TOOL_CALL, TOOL_CALL_END)
"""Control tokens that a policy may sample inside its turn."""

SYSTEM_TAGS = (*ACTION_TAGS, TOOL_RESPONSE, TOOL_RESPONSE_END)
"""Control tokens that a system prompt, which the user of the library wrote, may hold."""
