"""What of a composed configuration is counted."""

from pathlib import Path

import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.shape import RELEASED
from tests.models.tiny import tiny_checkpoint
from tests.planning.setups import setup_of


def test_sft_8b_is_table_4() -> None:
    setup = setup_of("experiment=sft_8b")
    assert (setup.kind, setup.model, setup.shape) == ("sft", "Qwen3-VL-8B-Instruct", RELEASED["Qwen3-VL-8B-Instruct"])
    assert (setup.nodes, setup.ranks_per_node, setup.ranks) == (32, 8, 256)
    assert (setup.zero.stage, setup.width, setup.compute_width, setup.checkpointing) == (3, 2, 2, True)
    assert (setup.max_length, setup.rows_per_rank, setup.max_steps) == (32_000, 1, 1144)
    assert setup.pass_tokens == 32_000


def test_grpo_30b_is_table_5() -> None:
    setup = setup_of("experiment=grpo_30b_a3b")
    assert (setup.prompts_per_step, setup.group_size, setup.mini_batch_prompts) == (256, 16, 128)
    assert (setup.ranks, setup.servers, setup.scoring_passes) == (32, 8, 1)
    assert setup.routers_taught
    # one trajectory may be longer than Table 5's budget of a pass
    assert setup.pass_tokens == 78_192
    assert not setup.ahead
    assert setup_of("experiment=grpo_8b", "callbacks.rollout_generation.max_staleness=1").ahead


def test_a_checkpoint_on_disk_counts_for_itself() -> None:
    setup = setup_of(f"model.path={tiny_checkpoint()}")
    assert setup.shape.tied
    assert (setup.zero.stage, setup.width, setup.ranks) == (0, 4, 1)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["data.batch_size=4"], 4 * 32_000),
        (["data.batch_size=4", "module.micro_batch=2"], 2 * 32_000),
        (["data.batch_size=4", "+data.micro_batch=1"], 32_000),
        (["data.batch_size=4", "+data.max_tokens_per_pass=50000"], 50_000),
        (["data.batch_size=4", "+data.packing=batch"], 32_000),
        (["data.batch_size=4", "+data.packing=tokens", "+data.pack_tokens=64000"], 64_000),
    ],
)
def test_the_largest_pass_of_fine_tuning(overrides: list[str], tokens: int) -> None:
    assert setup_of("experiment=sft_8b", *[text.replace("+data", "++data") for text in overrides]).pass_tokens == tokens


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.policy.train_vision=false", "model.policy.train_projector=null"], {"vision_tower", "projector"}),
        (["model.policy.train_vision=false", "++model.policy.train_projector=true"], {"vision_tower"}),
        (["++model.policy.train_projector=false"], {"projector"}),
        (
            ["++model.policy.train_language=false"],
            {"embedding", "attention", "mlp", "norms", "output_layer"},
        ),
    ],
)
def test_frozen_parts(overrides: list[str], parts: set[str]) -> None:
    setup = setup_of("experiment=sft_8b", *overrides)
    assert {part for part in setup.frozen if setup.shape.parameters()[part]} == parts


def test_adapters_of_named_layers() -> None:
    setup = setup_of("experiment=sft_8b", "++model.policy.lora={r: 8, target_modules: [q_proj, v_proj]}")
    assert setup.adapters == 36 * 8 * (4096 + 4096 + 4096 + 1024)
    with pytest.raises(ConfigurationError, match=r"target_modules is \['queries'\] and no layer"):
        setup_of("experiment=sft_8b", "++model.policy.lora={target_modules: [queries]}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["experiment=sft_8b", "model.path=models/none"], "shape of 'models/none' is not known"),
        (["experiment=sft_8b", "trainer.devices=auto"], "trainer.devices is 'auto'"),
        (["experiment=sft_8b", "trainer.strategy=fsdp"], "trainer.strategy is 'fsdp'"),
        (["experiment=sft_8b", "trainer.strategy.config.zero_optimization.stage=1"], "stage is 1; set 2 or 3"),
        (["experiment=sft_8b", "data.batch_size=0"], "data.batch_size is 0"),
        (["experiment=sft_8b", "++data.packing=some"], "data.packing is 'some'"),
        (["experiment=sft_8b", "model.policy.dtype=int8"], "model.policy.dtype is 'int8'"),
        (["experiment=grpo_8b", "module.sequence_parallel_size=3"], "does not divide 32 ranks"),
        (["experiment=sft_8b", "module._target_=a.Other"], "module._target_ is 'a.Other'"),
    ],
)
def test_what_cannot_be_counted(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        setup_of(*overrides)
    assert expected in str(caught.value)


def test_nothing_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup_of("experiment=grpo_30b_a3b")
    assert list(tmp_path.iterdir()) == []
