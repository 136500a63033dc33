"""Packed fine-tuning, frozen parts and adapters: one process against DDP, ZeRO-2 and ZeRO-3 in two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForImageTextToText

from opensearch_lightning import cli
from opensearch_lightning.callbacks import ThroughputLogging
from opensearch_lightning.chat import SFTBatch
from opensearch_lightning.launch import Run, check_checkpoint, export_policy
from opensearch_lightning.models import load_processor, merge_adapters
from opensearch_lightning.modules import AgenticSFT
from opensearch_lightning.modules.source_sums import SourceSums
from tests.models.tiny import tiny_checkpoint, tiny_policy
from tests.modules.test_sft import Batches, batch_of, sgd
from tests.modules.test_sft_batches import Kept, packed_of, sft_batch
from tests.strategies.cpu_ranks import on_ranks, trainer
from tests.strategies.test_zero import careful_adamw, furthest, weights_of

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")
pytest.importorskip("peft", reason="the extra lora is not installed")

Pass = tuple[Any, Sequence[int]]

# Samples 0, 2 and 3 have pictures, 1 and 4 are text; a pass is a layout and its samples.
# One pass against three; text alone against pictures, then the other way round, then pictures on both.
STEPS: list[tuple[list[Pass], list[Pass]]] = [
    ([(packed_of, [1, 4])], [(packed_of, [0, 2]), (batch_of, [3]), (packed_of, [3])]),
    ([(batch_of, [0, 3, 2]), (packed_of, [2, 0])], [(packed_of, [4])]),
    ([(packed_of, [3, 1])], [(packed_of, [0, 4]), (packed_of, [2])]),
    ([(packed_of, [4, 1, 4])], [(packed_of, [1]), (batch_of, [1, 4])]),
]
VAL: tuple[list[Pass], list[Pass]] = ([(packed_of, [1, 4])], [(packed_of, [0, 2]), (batch_of, [3, 1])])

STRATEGIES = ("ddp", "zero2", "zero3")
POLICIES: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen tower": {"train_vision": False, "train_projector": True},
    "frozen vision": {"train_vision": False},
    "frozen language": {"train_language": False},
    "lora": {"lora": {"r": 4, "alpha": 8}},
}


Step = tuple[list[Pass], list[Pass]]
# Pictures on both ranks, so that all parameters get a gradient.
ONE_PASS: Step = ([(batch_of, [0, 2])], [(packed_of, [3, 0])])
A_SECOND_ON_ONE_RANK: Step = ([(batch_of, [0, 2])], [(packed_of, [3]), (packed_of, [0])])
BUCKET = 20_000
"""Elements of gradients that DeepSpeed reduces together, below what these policies have."""


class Shares(Batches):
    """Each rank its share of every step; a rank alone takes all shares."""

    def __init__(self, first: int = 0, steps: Sequence[Step] = STEPS) -> None:
        super().__init__([])
        self.first, self.steps = first, steps

    def _share(self, step: Step) -> SFTBatch:
        assert self.trainer is not None
        alone = self.trainer.world_size == 1
        return sft_batch(*([*step[0], *step[1]] if alone else step[self.trainer.global_rank]))

    def train_dataloader(self) -> Any:
        self.train = [self._share(step) for step in self.steps[self.first :]]  # type: ignore[misc]
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        self.val = [self._share(VAL)]  # type: ignore[assignment,list-item]
        return super().val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"first": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]


def module_of(name: str, optimizer: Any = careful_adamw, **options: Any) -> AgenticSFT:
    settings = {"max_grad_norm": 0.5, "micro_batch": 2, "schedule": "constant", "warmup_ratio": 0.0, **options}
    # fresh adapters are drawn
    torch.manual_seed(0)
    return AgenticSFT(tiny_policy(**POLICIES[name]), optimizer=optimizer, **settings)


def fit(strategy: str, policy: str) -> dict[str, Any]:
    # ZeRO-3 adds gradients up in another order, which AdamW's division would make larger where they are next to nothing
    module, curves = module_of(policy, sgd_slow if policy == "whole" else careful_adamw), Kept()
    speed = ThroughputLogging(peak_tflops=1.0)
    run = trainer(strategy, len(STEPS), speed, logger=curves, val_check_interval=len(STEPS))
    run.fit(module, datamodule=Shares())
    return {"curves": curves.seen, "weights": weights_of(module.policy)}


class Watched(AgenticSFT):
    """Notes how many elements the gradients of all parameters have: the most in a pass, and behind the last one."""

    most = left = 0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for parameter in self.policy.parameters():
            # behind DeepSpeed's own hook, which may have shared the gradient and freed it
            parameter.register_post_accumulate_grad_hook(self._note)

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        super().manual_backward(loss, *args, **options)
        self.left = self._held()

    def _note(self, _: Tensor) -> None:
        self.most = max(self.most, self._held())

    def _held(self) -> int:
        return sum(parameter.grad.numel() for parameter in self.policy.parameters() if parameter.grad is not None)


def gradients_held(strategy: str, step: Step, micro_batch: int | None = None) -> tuple[int, int]:
    """Most elements of gradients in a pass of an update, and those between its last pass and the optimizer's step."""
    module = Watched(tiny_policy(), optimizer=sgd, schedule="constant", warmup_ratio=0.0, micro_batch=micro_batch)
    config = {"zero_optimization": {"reduce_bucket_size": BUCKET}}
    trainer(strategy, 1, config=config).fit(module, datamodule=Shares(steps=[step]))
    return module.most, module.left


def sgd_slow(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return optimizer


def interrupted_lora(strategy: str, folder: Path) -> dict[str, Any]:
    """Adapters trained with a checkpoint in the middle, resumed from it, and exported."""
    whole, data = module_of("lora"), Shares()
    keep = ModelCheckpoint(
        folder, filename="{step}", auto_insert_metric_name=False, every_n_train_steps=2, save_top_k=-1
    )
    run = trainer(strategy, len(STEPS), keep, enable_checkpointing=True, limit_val_batches=0)
    run.fit(whole, datamodule=data)
    shared = {"policy": whole.policy, "processor": load_processor(tiny_checkpoint())}
    built = Run(trainer=run, module=whole, datamodule=data, shared=shared, run_dir=folder)
    export_policy(built, "last")
    run.strategy.barrier()
    last = weights_of(whole.policy)
    resumed = module_of("lora")
    again = trainer(strategy, len(STEPS), limit_val_batches=0)
    again.fit(resumed, datamodule=Shares(), ckpt_path=folder / "2.ckpt", weights_only=False)
    return {"last": last, "resumed": weights_of(resumed.policy)}


def uneven_sums() -> tuple[tuple[str, ...], Tensor]:
    """Sums of a validation in which the first rank had no row."""
    sums = SourceSums()
    if torch.distributed.get_rank() == 1:
        sums.update(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), ("pictures", "text"))
    table = sums.compute()
    return sums.sources, table


def work(folder: Path) -> dict[str, Any]:
    done: dict[str, Any] = {strategy: {policy: fit(strategy, policy) for policy in POLICIES} for strategy in STRATEGIES}
    done["sums"] = uneven_sums()
    for strategy in ("zero2", "zero3"):
        done[strategy]["held"] = {
            "one pass": gradients_held(strategy, ONE_PASS),
            "micro-batches": gradients_held(strategy, ONE_PASS, micro_batch=1),
            "one pass here, two there": gradients_held(strategy, A_SECOND_ON_ONE_RANK),
        }
    for strategy in STRATEGIES:
        done[strategy]["run"] = interrupted_lora(strategy, folder / strategy)
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    tiny_checkpoint()
    return on_ranks(partial(work, folder), folder)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {policy: fit("one", policy) for policy in POLICIES}


def figures(logged: dict[str, float]) -> dict[str, float]:
    """What does not depend on how fast a machine is, or on who holds which row."""
    clocks = ("_per_second", "_share", "/mfu", "packing_efficiency")
    return {name: value for name, value in logged.items() if not name.endswith(clocks)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_curves_of_ranks_are_those_of_one_process(ranks: Any, alone: Any, strategy: str, policy: str) -> None:
    expected = alone[policy]
    start = dict(tiny_policy(**POLICIES[policy]).named_parameters())
    moved = {name for name, value in expected["weights"].items() if not torch.equal(value, start[name].detach())}
    assert moved == {name for name, weight in start.items() if weight.requires_grad}
    for rank in ranks:
        got = rank[strategy][policy]
        for one, other in zip(got["curves"], expected["curves"], strict=True):
            assert figures(one) == pytest.approx(figures(other), rel=1e-4 if "train/loss" in one else 1e-5, abs=1e-6)
            for name in figures(other):
                if "loss" in name:
                    assert one[name] == pytest.approx(other[name], abs=1e-5), name
        assert furthest(got["weights"], expected["weights"]) < 5e-6


def test_what_the_curves_hold(alone: Any) -> None:
    *steps, validated = alone["whole"]["curves"]
    assert len(steps) == len(STEPS)
    assert min(step["train/grad_norm"] for step in steps) > 0.5, "nothing was clipped"
    sources = [{name for name in step if name.startswith("train/loss/")} for step in steps]
    assert sources == [*[{"train/loss/pictures", "train/loss/text"}] * 3, {"train/loss/text"}]
    assert {name for name in validated if "loss" in name} == {"val/loss", "val/loss/pictures", "val/loss/text"}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradients_of_an_update_are_held_whole_only_where_a_rank_has_several_passes(ranks: Any, strategy: str) -> None:
    sizes = [parameter.numel() for parameter in tiny_policy().parameters()]
    # ZeRO-2 hangs a rank's own part on the parameters it belongs to, the one that both ranks share whole on both
    own = sum(sizes) // 2 + max(sizes) if strategy == "zero2" else 0
    for rank in ranks:
        held = rank[strategy]["held"]
        most, left = held["one pass"]
        assert left == 0
        assert 0 < most <= own + BUCKET + max(sizes) < sum(sizes)
        assert held["micro-batches"] == held["one pass here, two there"] == (sum(sizes), sum(sizes))


def test_ranks_that_saw_fewer_sources_have_the_sums_of_all(ranks: Any) -> None:
    for rank in ranks:
        sources, table = rank["sums"]
        assert sources == ("pictures", "text")
        assert table.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_throughput_is_that_of_all_ranks(ranks: Any) -> None:
    for strategy in STRATEGIES:
        first, second = (rank[strategy]["whole"]["curves"][0] for rank in ranks)
        names = [name for name in first if name.endswith(("_per_second", "_share", "_fraction", "_efficiency", "/mfu"))]
        assert len(names) == 6
        assert all(first[name] == second[name] for name in names)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_survive_an_interruption_and_are_merged_at_the_end(ranks: Any, folder: Path, strategy: str) -> None:
    for rank in ranks:
        run = rank[strategy]["run"]
        assert furthest(run["last"], run["resumed"]) == 0
    exported = AutoModelForImageTextToText.from_pretrained(folder / strategy / "policy", local_files_only=True)
    merged = merge_adapters(ranks[0][strategy]["run"]["last"], alpha=8)
    assert furthest(dict(exported.named_parameters()), merged) < 1e-6
    assert furthest(merged, plain_weights()) > 1e-3


def plain_weights() -> dict[str, Tensor]:
    return {name: value.detach() for name, value in tiny_policy().named_parameters()}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_adapters_of_a_folder_are_exported(
    ranks: Any, folder: Path, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = folder / strategy / "4.ckpt"
    check_checkpoint(checkpoint, module_of("lora"), Shares())
    arguments = ["export", str(checkpoint), str(tmp_path / "out"), "--model", str(tiny_checkpoint())]
    assert cli.main(arguments) == 2
    assert "give --lora-alpha" in capsys.readouterr().err
    assert cli.main([*arguments, "--lora-alpha", "8"]) == 0
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", local_files_only=True)
    merged = merge_adapters(ranks[0][strategy]["run"]["last"], alpha=8)
    assert furthest(dict(exported.named_parameters()), merged) < 1e-6
