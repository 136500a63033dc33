from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy

from opensearch_lightning.chat import ModelBatch, TokenizedSample, collate
from opensearch_lightning.data import ImageStore, SearchVLSFTDataModule, parse_sft
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import forbidden_token_ids
from opensearch_lightning.modules import AgenticSFT, adamw, muon_adamw
from opensearch_lightning.modules.sft_parts import split_rows
from tests.data.rows import answer, conversation, picture, row, sft_shards
from tests.data.trainers import trainer
from tests.models.tiny import tiny_policy, tiny_processor, tiny_renderer

SGD = partial(torch.optim.SGD, lr=1.0)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters())


def sample(number: int, *, n_images: int = 1) -> TokenizedSample:
    """A conversation whose length and images grow with ``number``."""
    if n_images == 0:
        record: Any = {"conversations": conversation(("human", "Q " * number), ("gpt", answer("x " * number)))}
    else:
        record = row(number, words=1 + 5 * number)
        record["conversations"][0]["value"] = "<image>" * n_images + "Which?"
        record["images"] = [picture(number + i, 32 * (1 + i)) for i in range(n_images)]
    parsed = parse_sft(record, name="", images=ImageStore(()))
    return tiny_renderer().conversation(parsed.system, parsed.turns())


def batch_of(samples: Sequence[TokenizedSample]) -> ModelBatch:
    renderer = tiny_renderer()
    return collate(
        samples, pad_id=renderer.pad_id, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size
    )


SAMPLES = [sample(3), sample(1, n_images=0), sample(2, n_images=2), sample(0), sample(4, n_images=0)]


def reference(policy: Any, samples: Sequence[TokenizedSample]) -> tuple[Tensor, float, int]:
    """Sum of the losses, share of right tokens, number of tokens: one row at a time, on the whole logits."""
    total, right, tokens = torch.zeros(()), 0, 0
    for one in samples:
        batch = batch_of([one])
        logits = policy(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            use_cache=False,
        ).logits[0, :-1]
        logits[:, list(forbidden_token_ids(policy.config))] = -1e9
        targets = torch.where(batch.step_ids[0, 1:] >= 0, batch.input_ids[0, 1:], -100)
        total = total + cross_entropy(logits, targets, reduction="sum")
        right += int((logits.argmax(-1) == targets).sum())
        tokens += int((targets >= 0).sum())
    return total, right / tokens, tokens


class Batches(L.LightningDataModule):
    """The given batches once."""

    def __init__(self, train: Sequence[ModelBatch], val: Sequence[ModelBatch] = ()) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.val, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def fit_once(samples: Sequence[TokenizedSample], **options: Any) -> tuple[AgenticSFT, dict[str, float]]:
    """One update on a fresh policy, with what it logged."""
    options = {"optimizer": sgd, "schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": None, **options}
    module = AgenticSFT(tiny_policy(), **options)
    run = trainer(1)
    run.fit(module, datamodule=Batches([batch_of(samples)]))
    return module, {name: float(value) for name, value in run.callback_metrics.items()}


def steps(module: AgenticSFT) -> dict[str, Tensor]:
    """How far each parameter moved: the gradient, under SGD at a learning rate of 1."""
    before = dict(tiny_policy().named_parameters())
    return {name: before[name] - value.detach() for name, value in module.policy.named_parameters()}


def expected_update() -> dict[str, Any]:
    """Loss, accuracy, tokens and gradients of :data:`SAMPLES`, worked out apart."""
    policy = tiny_policy().train()
    loss, accuracy, tokens = reference(policy, SAMPLES)
    (loss / tokens).backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return {"loss": loss.item() / tokens, "accuracy": accuracy, "tokens": tokens, "gradients": gradients}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return expected_update()


@pytest.mark.parametrize("micro_batch", [None, 1, 2, 4])
def test_one_update_is_that_of_the_mean_over_all_tokens(expected: dict[str, Any], micro_batch: int | None) -> None:
    module, logged = fit_once(SAMPLES, micro_batch=micro_batch)
    assert logged["train/loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert logged["train/token_accuracy"] == pytest.approx(expected["accuracy"])
    assert logged["train/tokens"] == expected["tokens"]
    norm = torch.stack([gradient.norm() for gradient in expected["gradients"].values()]).norm()
    assert logged["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, moved in steps(module).items():
        torch.testing.assert_close(moved, expected["gradients"][name], atol=2e-6, rtol=1e-4, msg=name)


def test_ranks_share_the_gradient_of_the_whole(expected: dict[str, Any], tmp_path: Path) -> None:
    # 2 + 3 rows in parts of 2: the ranks have different numbers of tokens and of parts, and one has no image
    shares = [[SAMPLES[1], SAMPLES[4]], [SAMPLES[0], SAMPLES[2], SAMPLES[3]]]

    class Shares(Batches):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            self.train = [batch_of(shares[self.trainer.global_rank])]
            return super().train_dataloader()

    class Save(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            torch.save((steps(pl_module), logged), tmp_path / f"{trainer.global_rank}.pt")  # type: ignore[arg-type]

    module = AgenticSFT(
        tiny_policy(), optimizer=sgd, schedule="constant", warmup_ratio=0, max_grad_norm=None, micro_batch=2
    )
    # a rank that waits for another in vain gives up in a minute
    ddp = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(minutes=1))
    run = trainer(1, Save(), devices=2, strategy=ddp, use_distributed_sampler=False)
    run.fit(module, datamodule=Shares([]))
    for rank in range(2):
        moved, logged = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert logged["train/tokens"] == expected["tokens"]
        assert logged["train/loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, step in moved.items():
            torch.testing.assert_close(step, expected["gradients"][name], atol=2e-6, rtol=1e-4, msg=name)


def test_parts_of_a_batch_are_those_of_its_rows() -> None:
    whole = batch_of(SAMPLES)
    for size in (1, 2, 3):
        parts = list(split_rows(whole, size, tiny_policy().config))
        for start, part in zip(range(0, len(SAMPLES), size), parts, strict=True):
            for name, value in vars(batch_of(SAMPLES[start : start + size])).items():
                if value is None:
                    assert getattr(part, name) is None
                else:
                    assert torch.equal(getattr(part, name), value), name


def test_gradient_is_clipped_and_its_norm_logged() -> None:
    free, logged = fit_once(SAMPLES)
    clipped, clipped_logged = fit_once(SAMPLES, max_grad_norm=0.5)
    assert clipped_logged["train/grad_norm"] == pytest.approx(logged["train/grad_norm"])
    scale = 0.5 / logged["train/grad_norm"]
    unclipped = steps(free)
    for name, moved in steps(clipped).items():
        torch.testing.assert_close(moved, unclipped[name] * scale, atol=1e-6, rtol=1e-3, msg=name)


def test_batch_without_images_moves_no_vision_parameter() -> None:
    module, _ = fit_once([SAMPLES[1], SAMPLES[4]])
    moved = steps(module)
    assert not any(bool(step.any()) for name, step in moved.items() if "visual" in name)


def test_validation_is_the_mean_over_all_batches() -> None:
    module = AgenticSFT(tiny_policy(), schedule="constant", warmup_ratio=0, micro_batch=1)
    run = trainer(1)
    held_out = [batch_of(SAMPLES[:1]), batch_of(SAMPLES[1:4]), batch_of(SAMPLES[4:])]
    (logged,) = run.validate(module, datamodule=Batches([], held_out), verbose=False)
    with torch.no_grad():
        loss, accuracy, tokens = reference(tiny_policy(), SAMPLES)
    assert logged["val/loss"] == pytest.approx(float(loss) / tokens, rel=1e-5)
    assert logged["val/token_accuracy"] == pytest.approx(accuracy)
    # another pass starts anew
    with torch.no_grad():
        loss, accuracy, tokens = reference(tiny_policy(), SAMPLES[:1])
    (logged,) = run.validate(module, datamodule=Batches([], held_out[:1]), verbose=False)
    assert logged["val/loss"] == pytest.approx(float(loss) / tokens, rel=1e-5)


def data_module(shards: Path, **options: Any) -> SearchVLSFTDataModule:
    return SearchVLSFTDataModule(shards, tiny_processor(), batch_size=4, **options)


@pytest.mark.parametrize("make", [adamw, muon_adamw])
def test_interrupted_training_ends_in_the_same_weights(tmp_path: Path, make: Any) -> None:
    shards = sft_shards(tmp_path / "s", 10)

    def run(max_steps: int, ckpt_path: Path | None = None) -> AgenticSFT:
        module = AgenticSFT(tiny_policy(), optimizer=partial(make, lr=1e-3), total_steps=6, warmup_ratio=0.4)
        saving = ModelCheckpoint(tmp_path, filename="{step}", auto_insert_metric_name=False, every_n_train_steps=4)
        trainer(max_steps, saving).fit(module, datamodule=data_module(shards), ckpt_path=ckpt_path, weights_only=False)
        return module

    whole = run(6).policy.state_dict()
    resumed = run(6, tmp_path / "4.ckpt").policy.state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_training_learns_and_follows_its_schedule(tmp_path: Path) -> None:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    watch = Watch()
    module = AgenticSFT(tiny_policy(), optimizer=partial(muon_adamw, lr=3e-3), schedule="linear", warmup_ratio=0.2)
    shards = sft_shards(tmp_path / "s", 10)
    run = trainer(10, watch)
    run.fit(module, datamodule=data_module(shards))
    # warm-up over 2 of 10 updates, then down over 8
    fractions = [0.5, 1, *(1 - i / 8 for i in range(8))]
    assert [seen["train/lr"] for seen in watch.seen] == pytest.approx([3e-3 * f for f in fractions])
    assert watch.seen[-1]["train/loss"] < 0.7 * watch.seen[0]["train/loss"]
    assert watch.seen[-1]["train/token_accuracy"] > watch.seen[0]["train/token_accuracy"]
    assert run.global_step == 10
    assert module.policy.training


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision_trains(tmp_path: Path, precision: Any) -> None:
    module = AgenticSFT(tiny_policy(), lr=1e-3)
    run = trainer(2, precision=precision)
    run.fit(module, datamodule=data_module(sft_shards(tmp_path / "s", 10)))
    assert 0 < float(run.callback_metrics["train/loss"]) < 20


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="micro_batch counts rows; got 0"):
        AgenticSFT(tiny_policy(), micro_batch=0)
    with pytest.raises(ConfigurationError, match="a cosine schedule needs an end: set Trainer"):
        trainer(-1).fit(AgenticSFT(tiny_policy()), datamodule=Endless([]))


class Endless(Batches):
    def train_dataloader(self) -> Any:
        return iter(lambda: batch_of(SAMPLES[:1]), None)
