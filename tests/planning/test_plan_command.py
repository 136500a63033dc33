"""Whole plans: what fits, what to change, and what stands beside the paper."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.cli import main
from opensearch_lightning.composition import compose_config
from opensearch_lightning.planning import Assumptions, Figures, count_memory, read_setup
from opensearch_lightning.planning.clusters import CLUSTERS
from opensearch_lightning.planning.remedies import remedies
from tests.planning.setups import plan_of

DAY = 86_400


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_runs_of_the_paper_and_what_they_cost_there() -> None:
    plan = plan_of("experiment=sft_8b")
    assert plan.fits
    assert plan.remedies == []
    assert plan.comparison is not None
    assert (plan.comparison.run.days, plan.comparison.run.gpus) == (2, 256)
    assert plan.comparison.estimated_days == pytest.approx(plan.seconds / DAY)
    assert plan.comparison.implied_mfu == pytest.approx(plan.training.flops * 1144 / (2 * DAY * 256 * 148e12))
    rl = plan_of("experiment=grpo_8b")
    assert rl.steps == 200
    assert rl.comparison is not None
    assert rl.comparison.estimated_days == pytest.approx(rl.seconds / DAY)
    # other machines, or another number of them, are not the paper's
    assert plan_of("experiment=sft_8b", cluster="h100").comparison is None
    assert plan_of("experiment=sft_8b", "trainer.num_nodes=4").comparison is None


def test_a_step_of_grpo_is_rollouts_then_scores_then_updates() -> None:
    plan = plan_of("experiment=grpo_8b")
    assert plan.rollouts is not None
    updating = plan.scoring + 4 * plan.training.seconds
    assert plan.step_seconds == pytest.approx(plan.rollouts.seconds + updating)
    ahead = plan_of("experiment=grpo_8b", "callbacks.rollout_generation.max_staleness=1")
    assert ahead.step_seconds == pytest.approx(max(plan.rollouts.seconds, updating))


# two rows of an update in a pass each, or in two packs: whole gradients, which a GPU has no room for
TWO_PASSES = ["experiment=sft_32b", "data.batch_size=2", "module.micro_batch=1"]
TWO_PACKS = ["experiment=sft_32b", "data.batch_size=2", "data.packing=batch"]


@pytest.mark.parametrize("run", [["experiment=grpo_1node"], ["experiment=grpo_30b_a3b"], TWO_PASSES, TWO_PACKS])
def test_what_is_told_to_fit_does(run: list[str]) -> None:
    plan = plan_of(*run)
    assert not plan.fits
    changes = [remedy.partition(" would fit")[0] for remedy in plan.remedies if " would fit" in remedy]
    assert changes
    for change in changes:
        words = change.split()
        # a group comes before the settings in it
        setup = read_setup(compose_config([*run, *words]))
        assert count_memory(setup, Figures()).peak <= CLUSTERS["h20"].memory, change


def test_a_row_too_long_for_a_gpu_is_split_between_ranks() -> None:
    plan = plan_of("experiment=grpo_1node")
    assert any(remedy.startswith("module.sequence_parallel_size=2 would fit") for remedy in plan.remedies)
    assert "as it is, it fits h200" in plan.remedies
    # routers with losses of their own keep ranks from reading rows together
    assert not any("sequence_parallel" in remedy for remedy in plan_of("experiment=grpo_30b_a3b").remedies)


def test_one_pass_an_update_is_told_where_that_helps() -> None:
    passes, packs = plan_of(*TWO_PASSES), plan_of(*TWO_PACKS)
    unlimited = "data.micro_batch=null data.max_tokens_per_pass=null"
    one_pack = "data.packing=tokens data.batch_size=1"
    assert any(remedy.startswith(f"{one_pack} {unlimited} would fit") for remedy in passes.remedies)
    assert any(remedy.startswith(f"module.micro_batch=null {unlimited} would fit") for remedy in passes.remedies)
    assert any(remedy.startswith(f"{one_pack} would fit") for remedy in packs.remedies)
    # longer rows would not go into one pass
    longer = plan_of(*TWO_PASSES, "data.max_length=64000")
    assert not any(remedy.startswith("module.micro_batch=null") for remedy in longer.remedies)


def test_heads_that_do_not_come_out_even_are_not_dealt() -> None:
    plan = plan_of("experiment=grpo_1node")
    odd = dataclasses.replace(plan.setup, shape=dataclasses.replace(plan.setup.shape, kv_heads=3))
    told = remedies(odd, Figures(), CLUSTERS["h20"], Assumptions())
    assert told
    assert not any("sequence_parallel" in remedy for remedy in told)


def test_of_several_sizes_the_smallest_is_told() -> None:
    plan = plan_of("experiment=grpo_1node")
    (told,) = [remedy for remedy in plan.remedies if "num_nodes" in remedy]
    assert told.startswith("trainer.num_nodes=2 ")


def test_text_says_what_it_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "experiment=sft_8b")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "all 8,767.12 8,767.12 8,767.12" in lines
    assert "gradients on their way 2.5 while a pass runs" in lines
    assert "It fits." in lines
    assert "epochs 8.00 of 36,592 rows" in lines
    assert any(line.startswith("paper, Table 4 2 days 256 H20") for line in lines)
    assert "utilization (MFU) 35% of 148 TFLOP/s, recomputed layers not counted" in lines


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert output(capsys, "experiment=sft_8b").rstrip("\n") in document
    times = next(part for part in output(capsys, "experiment=grpo_8b").split("\n\n") if part.startswith("time"))
    assert times in document


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(output(capsys, "experiment=grpo_30b_a3b", "--json", "--mfu", "0.5"))
    plan = plan_of("experiment=grpo_30b_a3b")
    assert found["parameters"]["total"] == plan.setup.parameters == 31_070_754_032
    assert found["gpu_memory"]["peak"] == plan.memory.peak
    assert found["gpu_memory"]["fits"] is False
    assert found["training"]["compute"] == pytest.approx(plan.training.compute * 0.35 / 0.5)
    assert found["rollouts"]["trajectories"] == 4096
    assert found["assumptions"] == dataclasses.asdict(Assumptions(mfu=0.5))
    assert found["paper"]["run"]["days"] == 10


def test_figures_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mean-tokens", "5750", "--images-per-row", "0", "--rows", "1000", "--json"]
    found = json.loads(output(capsys, "experiment=sft_8b", *arguments))
    assert found["data"]["sampled_tokens"] == 1000
    assert found["training"]["tokens"] == 256 * 5750


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["experiment=sft_8c"], "there is no experiment 'sft_8c'; did you mean 'sft_8b'?"),
        (["experiment=sft_8b", "--cluster", "h21"], "there is no cluster 'h21'; did you mean 'h20'?"),
        (["experiment=sft_8b", "model.path=x"], "the shape of 'x' is not known"),
        (["experiment=sft_8b", "--mfu", "1.2"], "mfu is 1.2"),
        (["experiment=sft_8b", "--mean-tokens", "0"], "mean_tokens is 0"),
        (["experiment=sft_8b", "trainer.max_steps=-1"], "the run has no end; set trainer.max_steps"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1
