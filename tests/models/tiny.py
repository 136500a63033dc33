"""A tiny policy to test with, built once a process."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from opensearch_lightning.chat import ChatRenderer, format_action
from opensearch_lightning.models import build_tiny_checkpoint, load_policy, load_processor

TEXTS = [
    "Which animal is the emblem of the town in the picture? The town of Velmora lies in the valley of the Sarn.",
    "1. Velmora (https://example.org/Velmora): Velmora is a town of 1982 inhabitants. img_2: 96x96 pixels.",
    format_action("I look the town up.", call=("text_search", {"q": "Velmora emblem"})),
    format_action(
        "I cut out the sign.", call=("crop", {"image": "img_1", "x": 10, "y": 20, "width": 30, "height": 40})
    ),
    format_action("That is the answer.", response="a heron"),
]


@functools.cache
def tiny_checkpoint() -> Path:
    """Folder of a tiny checkpoint; read only."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_tiny_checkpoint(folder, TEXTS * 5, vocab_size=512, hidden_size=64, heads=2, kv_heads=1)


def tiny_policy(**options: Any) -> Any:
    """A fresh copy of the tiny policy."""
    return load_policy(tiny_checkpoint(), **options)


@functools.cache
def tiny_processor() -> Any:
    """Its processor."""
    return load_processor(tiny_checkpoint())


@functools.cache
def tiny_renderer() -> ChatRenderer:
    """A renderer without tool schemas."""
    return ChatRenderer(tiny_processor())
