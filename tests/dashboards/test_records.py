"""Trajectories as JSON: what is trained is told apart from what is not, and nothing in it is not JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opensearch_lightning.dashboards.records import (
    TrajectoryRecord,
    image_file_name,
    outcome,
    trajectory_record,
    write_images,
)
from opensearch_lightning.types import NON_FATAL, Action, StopReason, Trajectory
from tests.dashboards.sample_runs import (
    HOSTILE,
    PAD,
    Words,
    answer,
    fatal_run,
    hostile_run,
    image_input,
    picture,
    right_run,
    task,
    trajectory,
    wrong_run,
)


def record(run: Trajectory, words: Words, **options: Any) -> TrajectoryRecord:
    settings: dict[str, Any] = {"kept_before": None, "advantage": None, "global_step": 4, "split": "train"} | options
    return trajectory_record(task(1), run, words.decode, **settings)


def text_of(made: TrajectoryRecord, *, step: int | None = None, kept: bool | None = None) -> str:
    return "".join(
        text for text, owner, keeps in made["tokens"] if step in (None, owner) and (kept is None or keeps is kept)
    )


def test_tokens_spell_the_conversation_and_each_names_its_step() -> None:
    words = Words()
    run = right_run(task(1), 0, words)
    made = record(run, words)
    for step in run.steps:
        assert text_of(made, step=step.index) == step.text + "<|im_end|>"
    assert text_of(made, kept=True) == "".join(step.text + "<|im_end|>" for step in run.steps)
    assert "1784 by Ines Okafor" in text_of(made, step=-1)


def test_steps_from_the_fatal_one_on_are_marked_as_masked() -> None:
    words = Words()
    run = fatal_run(task(1), 0, words)
    made = record(run, words, kept_before=run.fatal_step)
    assert (made["fatal_step"], made["kept_before"], made["is_fatal"]) == (1, 1, True)
    assert text_of(made, kept=True) == run.steps[0].text + "<|im_end|>"
    kept, masked = made["token_counts"]["kept"], made["token_counts"]["masked"]
    assert kept == int((run.step_ids == 0).sum()) and masked == int((run.step_ids >= 1).sum())


def test_a_hard_masked_trajectory_keeps_no_token_and_an_uncut_one_all() -> None:
    words = Words()
    run = right_run(task(1), 0, words)
    assert record(run, words, kept_before=0)["token_counts"]["kept"] == 0
    whole = record(run, words, kept_before=NON_FATAL)
    assert whole["kept_before"] is None and whole["token_counts"]["masked"] == 0
    assert whole["fatal_step"] is None


def test_the_pads_of_an_image_are_one_entry_that_names_it() -> None:
    words = Words()
    made = record(right_run(task(1), 0, words), words)
    pads = [text for text, _, _ in made["tokens"] if PAD in text]
    assert pads == [f"{PAD} × 16 (img_1)", f"{PAD} × 9 (img_2)"]
    assert made["token_counts"]["not_sampled"] > len([owner for _, owner, _ in made["tokens"] if owner < 0])


def test_tokens_that_share_a_character_are_shown_together() -> None:
    pieces = {0: b"caf", 1: b"\xc3", 2: b"\xa9", 3: b"\xff", 4: b"!"}

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace")

    run = replace(
        trajectory(task(1), 0, [answer(0, "x")], Words()),
        token_ids=torch.tensor([0, 1, 2, 1, 4, 3]),
        step_ids=torch.tensor([0, 0, 0, 0, 1, 1]),
    )
    made = trajectory_record(task(1), run, decode, kept_before=1, advantage=0.5, global_step=0, split="train")
    assert made["tokens"] == [
        ["caf", 0, True],
        ["é", 0, True],
        ["\ufffd", 0, True],
        ["!", 1, False],
        ["\ufffd", 1, False],
    ]


def test_calls_results_and_rewards_are_told_in_full() -> None:
    words = Words()
    made = record(right_run(task(1), 3, words), words, advantage=0.5, raw_advantage=torch.tensor(0.5), step=2)
    assert (made["step"], made["global_step"], made["rollout"]) == (2, 4, 3)
    assert (made["advantage"], made["raw_advantage"]) == (0.5, 0.5)
    assert made["reward"] == {"total": 0.744, "format": 0.8, "accuracy": 1.0, "query": 0.65}
    crop, failed, last = made["steps"][0], made["steps"][2], made["steps"][4]
    assert crop["action"]["arguments"] == {"image": "img_1", "x": 12, "y": 8, "width": 64, "height": 64}
    assert crop["image_name"] == "img_2"
    assert failed["observation"] is not None
    assert (failed["observation"]["error"], failed["observation"]["injected"]) == ("timeout", True)
    assert last["observation"] is None and last["action"]["response"] == "1784"


def test_numbers_and_texts_that_json_lacks_become_text() -> None:
    words = Words()
    run = hostile_run(task(1, hostile=True), 0, words)
    odd = replace(
        run.steps[0],
        action=Action(kind="tool_call", name="x", arguments={"a": [float("inf")], "b": "\ud800", "c": {1}}),
    )
    made = record(replace(run, steps=(odd, run.steps[1])), words, advantage=float("nan"))
    back = json.loads(json.dumps(made, allow_nan=False).encode("ascii"))
    assert back["steps"][0]["action"]["arguments"] == {"a": ["inf"], "b": "\ud800", "c": "{1}"}
    assert back["advantage"] == "nan"
    assert back["steps"][1]["action"]["response"] == HOSTILE


def test_pictures_are_files_named_by_their_content_and_written_once(tmp_path: Path) -> None:
    same, other = picture(1), picture(2)
    images = [image_input("img_1", same), image_input("img_2", same), image_input("img_3", other)]
    write_images(images, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({image_file_name(same), image_file_name(other)})
    assert (tmp_path / image_file_name(other)).read_bytes() == other
    before = (tmp_path / image_file_name(same)).stat().st_mtime_ns
    write_images(images, tmp_path)
    assert (tmp_path / image_file_name(same)).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("start", "suffix"), [(b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff\xe0", "jpg"), (b"<svg onload=x>", "bin")]
)
def test_the_file_name_tells_the_format_by_its_first_bytes(start: bytes, suffix: str) -> None:
    assert image_file_name(start).endswith(f".{suffix}")


def test_outcomes() -> None:
    words = Words()
    runs = {
        "right": right_run(task(1), 0, words),
        "wrong": wrong_run(task(1), 0, words),
        "fatal": fatal_run(task(1), 0, words),
        "unfinished": replace(fatal_run(task(1), 0, words), stop_reason=StopReason.MAX_TURNS),
        "unscored": replace(right_run(task(1), 0, words), reward=None),
    }
    assert {name: outcome(record(run, words)) for name, run in runs.items()} == {name: name for name in runs}
