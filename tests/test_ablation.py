"""The ablation's runner: from two policies to a table, and what a second call leaves alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from opensearch_lightning import ablation
from opensearch_lightning.ablation import Job, run_ablation
from opensearch_lightning.cli import main
from opensearch_lightning.errors import OpenSearchError

SMALL = (
    "trainer.max_steps=1",
    "+trainer.limit_val_batches=0",
    "data.prompts_per_step=2",
    "callbacks.rollout_generation.group_size=2",
    "callbacks.rollout_generation.max_turns=2",
    "callbacks.rollout_generation.max_turn_tokens=8",
    "callbacks.trajectory_log=null",
)
CELL = {"n": 1, "accuracy": 0.5, "reward": 0.5, "turns": 2.0, "tool_calls": 1.0, "fatal_fraction": 0.0}


def give_policy(out: Path, tiny: dict[str, Path], seed: int) -> None:
    """What the stages up to SFT leave of a seed."""
    folder = out / f"seed_{seed}"
    (folder / "shards").mkdir(parents=True)
    (folder / "sft").mkdir()
    for link, target in {
        "world": "world",
        "sft/policy": "model",
        **{f"shards/{s}": "rl" for s in ("rl", "val", "test")},
    }.items():
        (folder / link).symlink_to(tiny[target])


def test_two_arms_over_two_seeds(tmp_path: Path, tiny: dict[str, Path]) -> None:
    for seed in (1, 2):
        give_policy(tmp_path, tiny, seed)
    text = run_ablation(tmp_path, [1, 2], arms=["vanilla", "fatal_clamp"], overrides=SMALL)
    assert text.startswith("Mean over 2 seeds")
    assert (tmp_path / "ablation.html").is_file()
    scores = {}
    for seed in (1, 2):
        for arm in ("vanilla", "fatal_clamp"):
            folder = tmp_path / f"seed_{seed}" / arm
            assert (folder / "policy" / "model.safetensors").is_file()
            with (folder / "advantages.csv").open(newline="") as file:
                scores[seed, arm] = [(row["task_id"], row["rollout"], row["raw"]) for row in csv.DictReader(file)]
    # the arms of a seed meet the same tasks; another seed meets them in another order
    assert len(scores[1, "vanilla"]) == 4
    assert scores[1, "vanilla"] == scores[1, "fatal_clamp"]
    assert scores[1, "vanilla"] != scores[2, "vanilla"]
    result = json.loads((tmp_path / "seed_1" / "start" / "result.json").read_text())
    assert result["evaluation"]["sampled"]["n"] == 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings and measurements in the order made, none of which does anything."""
    made: list[str] = []

    def train(job: Job) -> None:
        made.append(f"train {job.arm}")
        (job.folder / "policy").mkdir(parents=True)

    def measure(job: Job, policy: Path, decoding: str) -> dict[str, float]:
        made.append(f"{decoding} {policy.relative_to(job.data)}")
        return CELL

    monkeypatch.setattr(ablation, "_train", train)
    monkeypatch.setattr(ablation, "_measure", measure)
    return made


def test_what_is_finished_is_not_run_again(tmp_path: Path, calls: list[str]) -> None:
    job = Job(out=tmp_path, seed=3, arm="vanilla")
    assert ablation._run_arm(job).startswith("seed 3, vanilla: accuracy 50.0%")
    assert calls == ["train vanilla", "greedy vanilla/policy", "sampled vanilla/policy"]
    assert ablation._run_arm(job) == ""
    assert len(calls) == 3


def test_a_trained_policy_that_was_not_measured_is_not_trained_again(tmp_path: Path, calls: list[str]) -> None:
    job = Job(out=tmp_path, seed=3, arm="vanilla")
    (job.folder / "policy").mkdir(parents=True)
    ablation._run_arm(job)
    assert calls == ["greedy vanilla/policy", "sampled vanilla/policy"]


def test_a_training_that_was_stopped_begins_anew(tmp_path: Path, calls: list[str]) -> None:
    job = Job(out=tmp_path, seed=3, arm="vanilla")
    left = job.folder / "checkpoints" / "last.ckpt"
    left.parent.mkdir(parents=True)
    left.touch()
    ablation._run_arm(job)
    assert calls[0] == "train vanilla"
    assert not left.exists()


def test_the_start_is_measured_only(tmp_path: Path, calls: list[str]) -> None:
    ablation._run_arm(Job(out=tmp_path, seed=3, arm="start"))
    assert calls == ["greedy sft/policy", "sampled sft/policy"]


def test_a_failed_training_names_its_log(tmp_path: Path) -> None:
    job = Job(out=tmp_path, seed=3, arm="vanilla", overrides=("no_such_setting=1",))
    with pytest.raises(OpenSearchError, match=r"exit code 2; .*logs/vanilla\.log says why"):
        ablation._train(job)
    assert "no_such_setting" in (job.data / "logs" / "vanilla.log").read_text()


def test_jobs_below_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablation", "--out", str(tmp_path), "--jobs", "0"]) == 2
    assert "--jobs is 0; set 1 or more" in capsys.readouterr().err
