"""Trajectories as plain JSON with their pictures as files: what the viewer reads.

``T``: tokens of one trajectory.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from opensearch_lightning.types import (
    NON_FATAL,
    ImageInput,
    RewardParts,
    Step,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
)

Decode = Callable[[list[int]], str]

_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
_FATAL_ENDS = frozenset({StopReason.FATAL_ERRORS.value, StopReason.REPETITION.value})
_LONGEST_CHARACTER = 8
"""Tokens that may share one character before their pieces are shown as they are."""


class ActionRecord(TypedDict):
    """A turn's action; ``arguments`` is JSON as the policy wrote it."""

    kind: str
    name: str | None
    arguments: Any
    response: str | None
    well_formed: bool
    error: str | None


class ObservationRecord(TypedDict):
    """What the executor returned; ``latency_s`` in seconds."""

    tool: str | None
    text: str
    error: str | None
    latency_s: float
    injected: bool
    cached: bool
    note: str | None


class StepRecord(TypedDict):
    """One turn; ``image_name`` is the picture its tool made."""

    index: int
    text: str
    action: ActionRecord
    observation: ObservationRecord | None
    image_name: str | None


class TrajectoryRecord(TypedDict):
    """One trajectory.

    ``fatal_step`` is ``None`` when no step is cut; steps below ``kept_before`` carry gradient. ``step`` counts training
    batches as the metrics do, ``global_step`` optimizer updates. ``tokens`` are ``[text, step or -1, carries
    gradient]``, one for each token, save that the pads of one image are one entry and so are tokens that share one
    character; ``token_counts`` counts tokens. ``images[i]["file"]`` is a file name as :func:`write_images` gives it.
    """

    task_id: str
    rollout: int
    split: str
    step: int
    global_step: int
    question: str
    answer: str
    stop_reason: str
    fatal_step: int | None
    is_fatal: bool
    kept_before: int | None
    reward: dict[str, float | str] | None
    advantage: float | str | None
    raw_advantage: float | str | None
    steps: list[StepRecord]
    images: list[dict[str, str]]
    tokens: list[list[Any]]
    token_counts: dict[str, int]


def trajectory_record(
    task: Task,
    trajectory: Trajectory,
    decode: Decode,
    *,
    kept_before: int | None,
    advantage: float | None,
    global_step: int,
    split: str,
    step: int | None = None,
    raw_advantage: float | None = None,
    image_pad: str = "<|image_pad|>",
) -> TrajectoryRecord:
    """``trajectory`` as JSON: only ``dict``, ``list``, ``str``, ``bool``, ``None`` and finite numbers.

    Args:
        task: the task it belongs to.
        trajectory: the run to record.
        decode: text of token ids, special tokens included (say, a tokenizer's ``decode``).
        kept_before: steps below this index carry gradient (``TrajectoryGroup.kept_steps``); ``None``: all do.
        advantage: what the loss multiplied the trajectory's tokens with; ``None`` when it had none.
        global_step: optimizer updates made so far.
        split: the batch's split (``"train"``, ``"val_greedy"``, …).
        step: training batches as metrics count them; ``global_step`` by default.
        raw_advantage: the advantage before the one-sided clamp.
        image_pad: text of the token that stands for a piece of an image.
    """
    kept_limit = NON_FATAL if kept_before is None else kept_before
    step_ids = trajectory.step_ids.tolist()
    kept = sum(0 <= owner < kept_limit for owner in step_ids)
    sampled = sum(owner >= 0 for owner in step_ids)
    return {
        "task_id": task.id,
        "rollout": trajectory.rollout,
        "split": split,
        "step": global_step if step is None else step,
        "global_step": global_step,
        "question": task.question,
        "answer": task.answer,
        "stop_reason": trajectory.stop_reason.value,
        "fatal_step": trajectory.fatal_step if trajectory.fatal_step < NON_FATAL else None,
        "is_fatal": trajectory.is_fatal,
        "kept_before": kept_before if kept_limit < NON_FATAL else None,
        "reward": _reward(trajectory.reward),
        "advantage": _number(advantage),
        "raw_advantage": _number(raw_advantage),
        "steps": [_step(item) for item in trajectory.steps],
        "images": [{"name": image.name, "file": image_file_name(image.encoded)} for image in trajectory.images],
        "tokens": [
            [text, owner, 0 <= owner < kept_limit]
            for text, owner in _token_texts(
                trajectory.token_ids.tolist(), step_ids, decode, [image.name for image in trajectory.images], image_pad
            )
        ],
        "token_counts": {"kept": kept, "masked": sampled - kept, "not_sampled": len(step_ids) - sampled},
    }


def image_file_name(encoded: bytes) -> str:
    """File name of an encoded image: its content's hash, and the format's suffix."""
    suffix = next((name for start, name in _SIGNATURES.items() if encoded.startswith(start)), "bin")
    return f"{hashlib.sha256(encoded).hexdigest()[:24]}.{suffix}"


def write_images(images: Iterable[ImageInput], directory: Path) -> None:
    """Writes each image into ``directory`` under its content's name; one that is there already is left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    for image in images:
        path = directory / image_file_name(image.encoded)
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}.tmp")
            scratch.write_bytes(image.encoded)
            scratch.replace(path)


def outcome(record: Mapping[str, Any]) -> str:
    """``"fatal"``, ``"right"``, ``"wrong"``, ``"unfinished"`` or ``"unscored"``: how a recorded trajectory went."""
    reward = record.get("reward")
    if record.get("is_fatal"):
        return "fatal" if record.get("stop_reason") in _FATAL_ENDS else "unfinished"
    if not isinstance(reward, Mapping):
        return "unscored"
    accuracy = reward.get("accuracy")
    return "right" if isinstance(accuracy, int | float) and accuracy >= 0.5 else "wrong"


def _reward(reward: RewardParts | None) -> dict[str, float | str] | None:
    if reward is None:
        return None
    parts = {"total": reward.total, "format": reward.format, "accuracy": reward.accuracy, "query": reward.query}
    return {name: _plain(float(value)) for name, value in parts.items()}


def _number(value: float | None) -> float | str | None:
    return None if value is None else _plain(float(value))


def _step(step: Step) -> StepRecord:
    action = step.action
    return {
        "index": step.index,
        "text": step.text,
        "action": {
            "kind": action.kind,
            "name": action.name,
            "arguments": None if action.arguments is None else _plain(action.arguments),
            "response": action.response,
            "well_formed": action.well_formed,
            "error": action.error.value if action.error is not None else None,
        },
        "observation": _observation(step.result),
        "image_name": step.image_name,
    }


def _observation(result: ToolResult | None) -> ObservationRecord | None:
    if result is None:
        return None
    return {
        "tool": result.tool,
        "text": result.text,
        "error": result.error.value if result.error is not None else None,
        "latency_s": round(float(result.latency_s), 6),
        "injected": result.injected,
        "cached": result.cached,
        "note": result.note,
    }


def _plain(value: Any) -> Any:
    """JSON of a value; numbers that JSON lacks (NaN, infinite) become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


def _token_texts(
    token_ids: list[int], step_ids: list[int], decode: Decode, image_names: list[str], image_pad: str
) -> Iterator[tuple[str, int]]:
    """Text and step of each entry; see :class:`TrajectoryRecord` for what makes an entry."""
    single: dict[int, str] = {}
    for token in token_ids:
        if token not in single:
            single[token] = decode([token])
    names = iter(image_names)
    start = 0
    while start < len(token_ids):
        owner, text = step_ids[start], single[token_ids[start]]
        end = start + 1
        if text == image_pad and owner < 0:
            end = _run_end(token_ids, start)
            text = f"{image_pad} × {end - start} ({next(names, 'unknown image')})"
        elif "\ufffd" in text:
            end, text = _whole_character(token_ids, step_ids, start, decode)
        yield text, owner
        start = end


def _run_end(token_ids: list[int], start: int) -> int:
    end = start + 1
    while end < len(token_ids) and token_ids[end] == token_ids[start]:
        end += 1
    return end


def _whole_character(token_ids: list[int], step_ids: list[int], start: int, decode: Decode) -> tuple[int, str]:
    """End and text of the shortest span of one step from ``start`` that decodes to whole characters."""
    for end in range(start + 2, min(start + _LONGEST_CHARACTER, len(token_ids)) + 1):
        if step_ids[end - 1] != step_ids[start]:
            break
        text = decode(token_ids[start:end])
        if "\ufffd" not in text:
            return end, text
    return start + 1, decode(token_ids[start : start + 1])
