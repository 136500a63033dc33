import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.modules import MuonAdamW, adamw, muon_adamw, warmup_schedule
from tests.models.tiny import tiny_policy


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))


def train(model: nn.Module, optimizer: Any, steps: int, schedule: Any = None, start: int = 0) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(7, (5,), generator=generator)
        optimizer.zero_grad()
        model(tokens).square().sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_adamw_decays_matrices_only() -> None:
    model = small_model()
    optimizer = adamw(model, lr=0.1, weight_decay=0.5)
    matrices, vectors = optimizer.param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(7, 4), (8, 4), (4, 8)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(8,), (8,), (8,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)


def test_adamw_leaves_frozen_parameters_out() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in adamw(model, lr=0.1).param_groups) == 5
    model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        adamw(model, lr=0.1)


def test_muon_takes_the_hidden_matrices() -> None:
    policy = tiny_policy()
    optimizer = muon_adamw(policy, lr=0.1, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    muon, *rest = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert all(name.endswith(".weight") for name in muon)
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in muon
    assert any(name.startswith("model.visual.blocks.0") for name in muon)
    others = [name for names in rest for name in names]
    assert "model.language_model.embed_tokens.weight" in others  # tied to the output layer
    assert any("patch_embed" in name for name in others)
    assert any("pos_embed" in name for name in others)
    assert sorted([*muon, *others]) == sorted(names.values())


def test_muon_leaves_an_untied_output_layer_to_adamw() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 7, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    muon, rest = muon_adamw(model, lr=0.1).param_groups
    assert muon["params"] == [model.hidden.weight]
    assert rest["params"] == [model.head.weight]


def test_muon_adamw_is_both_at_once() -> None:
    together, apart = small_model(), small_model()
    optimizer = muon_adamw(together, lr=0.01, weight_decay=0.1)
    matrices = [p for name, p in apart.named_parameters() if name in ("1.weight", "3.weight")]
    others = [p for p in apart.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": 0.1},
            {"params": others[1:], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    train(together, optimizer, 3)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        apart.zero_grad()
        apart(torch.randint(7, (5,), generator=generator)).square().sum().backward()
        muon.step()
        rest.step()
    assert equal(weights(together), weights(apart))


@pytest.mark.parametrize("make", [adamw, muon_adamw])
def test_optimizer_and_schedule_resume_exactly(make: Any) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        model = small_model()
        optimizer = make(model, lr=0.01, weight_decay=0.1)
        return model, optimizer, warmup_schedule(optimizer, schedule="cosine", total_steps=8, warmup_steps=2)

    whole, optimizer, schedule = build()
    train(whole, optimizer, 7, schedule)

    before, optimizer, schedule = build()
    train(before, optimizer, 3, schedule)
    saved = copy.deepcopy((before.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    after, optimizer, schedule = build()
    for part, state in zip((after, optimizer, schedule), saved, strict=True):
        part.load_state_dict(state)
    train(after, optimizer, 4, schedule, start=3)
    assert equal(weights(after), weights(whole))


def test_schedule_moves_every_group() -> None:
    optimizer = muon_adamw(small_model(), lr=0.5)
    schedule = warmup_schedule(optimizer, schedule="linear", total_steps=4)
    assert len(optimizer.param_groups) == 3
    for expected in (0.5, 0.375, 0.25, 0.125, 0.0, 0.0):
        assert [group["lr"] for group in optimizer.param_groups] == [expected] * 3
        optimizer.step()
        schedule.step()


def test_learning_rate_zero_moves_nothing() -> None:
    # the groups that the schedule changes are those that both parts step with
    model = small_model()
    optimizer = muon_adamw(model, lr=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = weights(model)
    train(model, optimizer, 2)
    assert equal(before, weights(model))


def test_closure_is_called_once_with_gradients() -> None:
    model = small_model()
    optimizer = muon_adamw(model, lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(3)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    before = weights(model)
    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert not equal(before, weights(model))


def test_muon_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="found 0 hidden matrices and 1 other"):
        muon_adamw(nn.Embedding(3, 2), lr=0.1)
    with pytest.raises(ConfigurationError, match="found 1 hidden matrices and 0 other"):
        muon_adamw(nn.Linear(3, 2, bias=False), lr=0.1)


def fractions(n: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_schedule(optimizer, **options)
    taken = []
    for _ in range(n):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return taken


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "total_steps": 6, "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "total_steps": 4, "min_ratio": 0.5}, [1, 0.875, 0.75, 0.625, 0.5, 0.5]),
        ({"schedule": "cosine", "total_steps": 4}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        # 0.1 of 15 updates: 2 of warm-up
        ({"schedule": "linear", "total_steps": 15, "warmup_ratio": 0.1}, [0.5, 1, 1, 12 / 13]),
        ({"total_steps": 4, "warmup_ratio": 1.0}, [0.25, 0.5, 0.75, 1, 1]),
    ],
)
def test_schedules(options: dict[str, Any], expected: list[float]) -> None:
    assert fractions(len(expected), **options) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "schedule is 'cosin'; set one of constant, linear, cosine"),
        ({"schedule": "cosine"}, "needs total_steps"),
        ({"warmup_ratio": 0.1}, "needs total_steps"),
        ({"total_steps": 4, "warmup_steps": 5}, "a warm-up of 5 updates does not fit into 4"),
        ({"total_steps": 4, "warmup_steps": 1, "warmup_ratio": 0.5}, "not both"),
    ],
)
def test_schedules_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fractions(1, **options)


def test_factories_can_be_configured_in_advance() -> None:
    assert isinstance(partial(muon_adamw, lr=0.1)(small_model()), MuonAdamW)
