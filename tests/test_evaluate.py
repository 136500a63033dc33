"""The figures of an evaluation, and their refusal where there are none."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from opensearch_lightning import evaluate
from opensearch_lightning.errors import OpenSearchError
from opensearch_lightning.evaluation import pass_at_1
from opensearch_lightning.types import StopReason, Task, TrajectoryGroup
from tests.modules.rollouts import trajectory


def groups(*rewards: float | None, n_lost: int = 0) -> list[TrajectoryGroup]:
    task = Task(id="a", question="", answer="", images=())
    rows = tuple(trajectory("a", number, reward) for number, reward in enumerate(rewards))
    return [TrajectoryGroup(task=task, trajectories=rows, n_lost=n_lost)]


def test_figures_are_over_what_was_judged() -> None:
    figures = pass_at_1(groups(1.0, 0.0, 0.0, 1.0, None, n_lost=2))
    assert (figures.accuracy, figures.stderr, figures.n, figures.unjudged) == (0.5, 0.25, 4, 3)


def test_figures_name_who_judged() -> None:
    (group,) = groups(1.0, 0.0, None)
    judged = [t if t.reward is None else replace(t, reward=replace(t.reward, scorer="x")) for t in group.trajectories]
    assert pass_at_1([replace(group, trajectories=tuple(judged))]).scorer == "x"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """``opensearch evaluate`` without data and model; ``evaluate.evaluate`` is for the test to set."""
    monkeypatch.setattr(evaluate, "read_tasks", lambda shards, limit: [])
    return argparse.Namespace(
        shards=tmp_path, limit=None, overrides=[], decoding="greedy", out=tmp_path / "figures.json"
    )


def test_figures_are_written(command: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: groups(1.0, None))
    assert evaluate.run(command) == 0
    assert json.loads(command.out.read_text())["accuracy"] == 1.0


def test_nothing_judged_is_an_error_and_no_file(
    command: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: groups(None, None, n_lost=3))
    with pytest.raises(OpenSearchError, match="5 rollouts are without a verdict, 3 of them lost.*check that the judge"):
        evaluate.run(command)
    assert not command.out.exists()
    assert capsys.readouterr().out == ""


def test_prompts_that_leave_no_room_are_an_error_and_no_accuracy(
    command: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = groups(0.0, 0.0)
    full = [replace(run, steps=(), stop_reason=StopReason.CONTEXT_LENGTH) for run in group.trajectories]
    stopped = replace(group, trajectories=tuple(full))
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: [stopped])
    with pytest.raises(
        OpenSearchError, match=r"all 2 rollouts fill the engine's context.*raise rollout\.engine\.max_length"
    ):
        evaluate.run(command)
    assert not command.out.exists()


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one(command: argparse.Namespace, limit: int) -> None:
    command.limit = limit
    with pytest.raises(OpenSearchError, match=f"--limit is {limit}; give the number of tasks"):
        evaluate.run(command)


def test_out_is_checked_before_the_work(
    command: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: pytest.fail("it must not begin"))
    command.out = tmp_path
    with pytest.raises(OpenSearchError, match=r"--out=.* is a folder; give the name of a file"):
        evaluate.run(command)
    (tmp_path / "file").write_text("")
    command.out = tmp_path / "file" / "figures.json"
    with pytest.raises(OpenSearchError, match="--out=.* cannot be a folder: .*file is a file"):
        evaluate.run(command)


def test_figures_are_printed_though_they_cannot_be_written(
    command: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_the_disk(*_: object, **__: object) -> list[TrajectoryGroup]:
        command.out.mkdir()
        return groups(1.0)

    monkeypatch.setattr(evaluate, "evaluate", fill_the_disk)
    with pytest.raises(OpenSearchError, match="cannot be written .*; the figures stand above"):
        evaluate.run(command)
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0
