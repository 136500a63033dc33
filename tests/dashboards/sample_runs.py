"""Run directories with plausible contents: real trajectories, metrics that look like a run's, held-out results."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from opensearch_lightning.dashboards.records import trajectory_record, write_images
from opensearch_lightning.types import (
    NON_FATAL,
    Action,
    ErrorKind,
    ImageInput,
    RewardParts,
    Step,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
)

TOOLS = ("crop", "image_search", "layout_parsing", "perspective_correct", "sharpen", "super_resolution", "text_search")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>\u2028\u202e&amp;"
PAD = "<|image_pad|>"


class Words:
    """A tokenizer of pieces: whole control tokens, words with the space before them, single characters otherwise."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def encode(self, pieces: Sequence[str]) -> list[int]:
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in pieces]

    def split(self, text: str) -> list[int]:
        words = text.split(" ")
        return self.encode([word if i == 0 else f" {word}" for i, word in enumerate(words)])

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self._texts[token] for token in token_ids)


WORDS = Words()
"""The tokenizer of the sample runs."""


def picture(seed: int, size: tuple[int, int] = (160, 120)) -> bytes:
    """A PNG of some shapes."""
    rng = random.Random(seed)
    image = Image.new("RGB", size, tuple(rng.randrange(150, 256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(5):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        box = (x, y, x + rng.randrange(10, 60), y + rng.randrange(10, 60))
        color = tuple(rng.randrange(256) for _ in range(3))
        rng.choice([draw.ellipse, draw.rectangle])(box, fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def image_input(name: str, encoded: bytes) -> ImageInput:
    return ImageInput(name=name, encoded=encoded, pixel_values=torch.zeros(4, 8), grid_thw=(1, 2, 2))


def call(index: int, tool: str, arguments: dict[str, Any], result: ToolResult, image_name: str | None = None) -> Step:
    body = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    think = f"<think>\nStep {index}: I should use {tool} to find out more.\n</think>"
    return Step(
        index=index,
        text=f"{think}\n<tool_call>\n{body}\n</tool_call>",
        action=Action(kind="tool_call", name=tool, arguments=arguments, well_formed=True),
        result=result,
        image_name=image_name,
    )


def answer(index: int, response: str) -> Step:
    return Step(
        index=index,
        text=f"<think>\nNow I know it.\n</think>\n<response>{response}</response>",
        action=Action(kind="response", response=response, well_formed=True),
    )


def failure(tool: str, kind: ErrorKind = ErrorKind.TIMEOUT, *, injected: bool = True) -> ToolResult:
    text = f"Error: {kind.value}. The tool {tool} did not answer; try again or go on another way."
    return ToolResult(tool=tool, text=text, error=kind, latency_s=10.0, injected=injected)


def trajectory(
    task: Task,
    rollout: int,
    steps: Sequence[Step],
    words: Words,
    *,
    made_images: Sequence[ImageInput] = (),
    stop_reason: StopReason = StopReason.RESPONSE,
    fatal_step: int = NON_FATAL,
    is_fatal: bool = False,
    reward: RewardParts | None = None,
) -> Trajectory:
    """A trajectory whose tokens spell its conversation."""
    task_images = tuple(image_input(f"img_{i + 1}", encoded) for i, encoded in enumerate(task.images))
    token_ids = words.split("<|im_start|>system\nAnswer the question about the picture. Tools: crop, text_search.")
    for _ in task_images:
        token_ids += words.encode(["<|vision_start|>", *[PAD] * 16, "<|vision_end|>"])
    token_ids += words.split(f"{task.question}<|im_end|>\n<|im_start|>assistant\n")
    step_ids = [-1] * len(token_ids)
    for step in steps:
        sampled = [*words.split(step.text), *words.encode(["<|im_end|>"])]
        token_ids += sampled
        step_ids += [step.index] * len(sampled)
        if step.result is not None:
            observation = words.split(f"\n<|im_start|>user\n<tool_response>\n{step.result.text}\n</tool_response>")
            if step.image_name is not None:
                observation += words.encode(["<|vision_start|>", *[PAD] * 9, "<|vision_end|>"])
            observation += words.split("<|im_end|>\n<|im_start|>assistant\n")
            token_ids += observation
            step_ids += [-1] * len(observation)
    return Trajectory(
        task_id=task.id,
        rollout=rollout,
        steps=tuple(steps),
        images=(*task_images, *made_images),
        token_ids=torch.tensor(token_ids),
        step_ids=torch.tensor(step_ids),
        sampling_logprobs=torch.zeros(len(token_ids)),
        stop_reason=stop_reason,
        fatal_step=fatal_step,
        is_fatal=is_fatal,
        reward=reward,
    )


PASSAGES = (
    "1. Orlesta (https://mini.wiki/Orlesta): Orlesta is a harbour town in the north of Vandria, with salt works. "
    "The town's emblem shows a silver heron over three waves.\n"
    "2. Salt works of Orlesta (https://mini.wiki/Salt_works): They were founded in 1784 by Ines Okafor."
)


def task(number: int, hostile: bool = False) -> Task:
    return Task(
        id=f"task-{number:04d}" + (HOSTILE if hostile else ""),
        question=HOSTILE if hostile else "In which year were the salt works of the town with this emblem founded?",
        answer=HOSTILE if hostile else "1784",
        images=(picture(number),),
    )


def right_run(item: Task, rollout: int, words: Words) -> Trajectory:
    small = image_input("img_2", picture(1000 + rollout, (64, 64)))
    steps = [
        call(
            0,
            "crop",
            {"image": "img_1", "x": 12, "y": 8, "width": 64, "height": 64},
            ToolResult(tool="crop", text="img_2: 64×64 pixels.", latency_s=0.0042),
            "img_2",
        ),
        call(
            1,
            "image_search",
            {"url": "img_2"},
            ToolResult(tool="image_search", text="1. Emblem of Orlesta (https://mini.wiki/Orlesta)", latency_s=0.18),
        ),
        call(2, "text_search", {"q": "salt works Orlesta"}, failure("text_search")),
        call(
            3,
            "text_search",
            {"q": "salt works Orlesta founded", "hl": "en", "top_k": 2},
            ToolResult(tool="text_search", text=PASSAGES, latency_s=0.031, cached=True, hits=2),
        ),
        answer(4, "1784"),
    ]
    reward = RewardParts(total=0.744, format=0.8, accuracy=1.0, query=0.65)
    return trajectory(item, rollout, steps, words, made_images=[small], reward=reward)


def wrong_run(item: Task, rollout: int, words: Words) -> Trajectory:
    steps = [
        call(
            0,
            "text_search",
            {"q": "emblem with heron"},
            ToolResult(tool="text_search", text="No results.", latency_s=0.02, hits=0),
        ),
        Step(
            index=1,
            text='<tool_call>{"name": "super_resolution", "arguments": {"image": "img_1"}</tool_call> maybe',
            action=Action(kind="error", error=ErrorKind.MALFORMED_CALL),
            result=ToolResult(
                tool=None,
                text="Error: malformed_call. The call is not one JSON object; write it again.",
                error=ErrorKind.MALFORMED_CALL,
            ),
        ),
        answer(2, "1801"),
    ]
    reward = RewardParts(total=0.067, format=0.667, accuracy=0.0, query=0.5)
    return trajectory(item, rollout, steps, words, reward=reward)


def fatal_run(item: Task, rollout: int, words: Words) -> Trajectory:
    steps = [
        call(
            0,
            "layout_parsing",
            {"image": "img_1"},
            ToolResult(tool="layout_parsing", text="title: ORLESTA\ntext: SAL ET LABOR", latency_s=1.2),
        ),
        *(call(i, "text_search", {"q": f"Orlesta attempt {i}"}, failure("text_search")) for i in (1, 2)),
        call(3, "crop", {"image": "img_9"}, failure("crop", ErrorKind.UNKNOWN_IMAGE, injected=False)),
    ]
    return trajectory(
        item,
        rollout,
        steps,
        words,
        stop_reason=StopReason.FATAL_ERRORS,
        fatal_step=1,
        is_fatal=True,
        reward=RewardParts(total=0.0, format=1.0, accuracy=0.0, query=0.0),
    )


def hostile_run(item: Task, rollout: int, words: Words) -> Trajectory:
    result = ToolResult(tool=HOSTILE, text=HOSTILE, latency_s=0.01, note=HOSTILE)
    steps = [call(0, HOSTILE, {HOSTILE: [HOSTILE, float("nan")]}, result), answer(1, HOSTILE)]
    return trajectory(item, rollout, steps, words, reward=RewardParts(total=1, format=1, accuracy=1, query=1))


def group(number: int, words: Words, size: int = 8) -> TrajectoryGroup:
    item = task(number)
    makers: list[Callable[[Task, int, Words], Trajectory]] = [right_run, wrong_run, fatal_run, wrong_run]
    trajectories = tuple(makers[(number + i) % len(makers)](item, i, words) for i in range(size))
    return TrajectoryGroup(
        task=item, trajectories=trajectories, kept_steps=tuple(item.fatal_step for item in trajectories)
    )


def write_trajectories(directory: Path, groups: Sequence[TrajectoryGroup], split: str, step: int) -> None:
    """Writes a file as the callback does; the trajectories' tokens must be those of :data:`WORDS`."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for item in groups:
        for number, run in enumerate(item.trajectories):
            raw = 0.9 if run.reward is not None and run.reward.accuracy else -0.4
            record = trajectory_record(
                item.task,
                run,
                WORDS.decode,
                kept_before=item.kept_steps[number] if item.kept_steps else None,
                advantage=(max(raw, 0.0) if run.is_fatal else raw) if split == "train" else None,
                raw_advantage=raw if split == "train" else None,
                global_step=2 * step,
                split=split,
                step=step,
            )
            lines.append(json.dumps(record))
            write_images(run.images, directory / "images")
    name = split if split.isidentifier() else "odd"
    (directory / f"{name}-{step:08d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    columns = sorted({key for row in rows for key in row}, key=lambda name: (name != "step", name))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def grpo_rows(steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Metrics of a run that slowly learns."""
    rng = random.Random(seed)
    rows = []
    for step in range(steps):
        skill = 1 - math.exp(-3 * step / steps)
        noise = lambda scale: rng.gauss(0, scale)  # noqa: E731
        accuracy = min(1, max(0, 0.2 + 0.4 * skill + noise(0.06)))
        fatal = min(1, max(0, 0.35 - 0.25 * skill + noise(0.03)))
        row: dict[str, float] = {
            "step": step,
            "epoch": 0,
            "train/accuracy": accuracy,
            "train/reward": 0.8 * accuracy + 0.05,
            "train/reward_accuracy": accuracy,
            "train/reward_format": min(1, 0.7 + 0.2 * skill + noise(0.02)),
            "train/reward_query": min(1, 0.4 + 0.2 * skill + noise(0.03)),
            "train/turns": 3.2 + 1.4 * skill + noise(0.15),
            "train/tool_calls": 2.4 + 1.3 * skill + noise(0.15),
            "train/fatal_fraction": fatal,
            "train/clamped_fraction": 0.85 * fatal,
            "train/clamp_bias": 0.6 * fatal + abs(noise(0.01)),
            "train/equal_reward_fraction": 0.3 - 0.1 * skill,
            "train/invalid_fraction": 0.0,
            "train/loss": noise(0.02),
            "train/grad_norm": 0.4 + abs(noise(0.1)),
            "train/lr": 1e-4 * (1 - step / steps),
            "train/ratio_max_error": 2e-6 + abs(noise(1e-6)),
            "train/sampled_tokens": 182 + 30 * skill + noise(5),
            "train/stop/response": 1 - fatal,
            "train/stop/fatal_errors": 0.8 * fatal,
            "train/stop/max_turns": 0.2 * fatal,
            "time/rollout_s": 5.5 + noise(0.3),
            "time/update_s": 3.9 + noise(0.2),
        }
        for number, tool in enumerate(TOOLS):
            calls = max(0, round(12 + 20 * (number == 6) + 8 * skill + noise(3)))
            row[f"tools/{tool}/calls"] = calls
            row[f"tools/{tool}/errors/timeout"] = round(0.2 * calls)
            row[f"tools/{tool}/errors/malformed_call"] = round(0.1 * calls * (1 - skill))
            row[f"tools/{tool}/errors/rate_limited"] = 0
            row[f"tools/{tool}/cache_hits"] = round(0.3 * calls)
            row[f"tools/{tool}/latency_p50_s"] = 0.002 * 4**number * math.exp(noise(0.1))
            row[f"tools/{tool}/latency_p95_s"] = 0.005 * 4**number * math.exp(noise(0.2))
        if step % 5 == 4:
            for split, lag in (("val_greedy", 0.1), ("val_sampled", -0.08)):
                row |= {
                    f"{split}/accuracy": min(1, max(0, 0.2 + lag + 0.45 * skill + noise(0.02))),
                    f"{split}/turns": 3.4 + 1.2 * skill + noise(0.05),
                    f"{split}/fatal_fraction": max(0, 0.2 - 0.15 * skill),
                }
        rows.append(row)
    return rows


def sft_rows(steps: int, every: int = 5, seed: int = 1) -> list[dict[str, float]]:
    rng = random.Random(seed)
    rows = []
    for step in range(every - 1, steps, every):
        loss = 0.02 + 3.5 * math.exp(-5 * step / steps) + rng.gauss(0, 0.01)
        rows.append(
            {
                "step": step,
                "epoch": step // 200,
                "train/loss": loss,
                "train/token_accuracy": 1 - loss / 4.5,
                "train/lr": 3e-3 * (1 - step / steps),
                "train/grad_norm": 0.5 + abs(rng.gauss(0, 0.1)),
            }
        )
    return rows


EVALUATION = {
    "rows": [
        {
            "name": name,
            "cells": {
                key: {"accuracy": value, "stderr": math.sqrt(value * (1 - value) / 240), "n": 240, "fatal_fraction": f}
                for key, value, f in zip(
                    ("greedy", "sampled", "greedy_faults", "sampled_faults"), accuracies, fatal, strict=True
                )
            },
        }
        for name, accuracies, fatal in (
            ("random weights", (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)),
            ("after SFT", (0.421, 0.179, 0.325, 0.142), (0.05, 0.21, 0.12, 0.31)),
            ("after GRPO", (0.746, 0.508, 0.638, 0.458), (0.008, 0.04, 0.05, 0.083)),
            ("SFT continued", (0.583, 0.296, 0.442, 0.233), (0.03, 0.12, 0.1, 0.2)),
        )
    ],
    "meta": {
        "judge": "exact match",
        "tasks": "240 held-out tasks of MiniWiki, seed 7",
        "fault_rates": {"timeout": 0.25},
    },
}


def make_sft_run(directory: Path) -> Path:
    write_csv(directory / "metrics.csv", sft_rows(400))
    return directory


def make_grpo_run(directory: Path, steps: int = 60) -> Path:
    write_csv(directory / "metrics.csv", grpo_rows(steps))
    for step in range(0, steps, 20):
        write_trajectories(directory / "trajectories", [group(step, WORDS), group(step + 1, WORDS)], "train", step)
        held_out = [
            TrajectoryGroup(task=task(900 + i), trajectories=(maker(task(900 + i), 0, WORDS),))
            for i, maker in enumerate((right_run, wrong_run, right_run, fatal_run))
        ]
        write_trajectories(directory / "trajectories", held_out, "val_greedy", step + 4)
    (directory / "evaluation.json").write_text(json.dumps(EVALUATION), encoding="utf-8")
    return directory


def make_hostile_run(directory: Path) -> Path:
    """A run whose every text tries to become markup or code."""
    rows = [
        {"step": i, f"train/{HOSTILE}": i, "train/accuracy": i / 3, f"tools/{HOSTILE}/calls": 2,
         f"tools/{HOSTILE}/errors/{HOSTILE}": 1}
        for i in range(3)
    ]  # fmt: skip
    write_csv(directory / "metrics.csv", rows)
    item = task(1, hostile=True)
    runs = (hostile_run(item, 0, WORDS),)
    write_trajectories(
        directory / "trajectories", [TrajectoryGroup(task=item, trajectories=runs)], HOSTILE[:2] + "x", 0
    )
    cells = {HOSTILE: {"accuracy": 0.5, "stderr": 0.1, "n": 4, "fatal_fraction": 0.0}}
    results = {"rows": [{"name": HOSTILE, "cells": cells}] * 2, "meta": {HOSTILE: HOSTILE}}
    (directory / "evaluation.json").write_text(json.dumps(results), encoding="utf-8")
    return directory
