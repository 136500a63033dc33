import numpy as np
import pytest
import torch

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rollout import SamplingParams, SessionKey
from opensearch_lightning.rollout.noise import turn_uniforms
from opensearch_lightning.rollout.sampling import sample_tokens

LOGITS = torch.log(torch.tensor([0.5, 0.2, 0.2, 0.1]))


def draw(u: float, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> tuple[int, float]:
    ids, logprobs = sample_tokens(
        LOGITS[None].clone(),
        torch.tensor([u], dtype=torch.float64),
        torch.tensor([temperature]),
        torch.tensor([top_p]),
        torch.tensor([top_k]),
    )
    return int(ids[0]), float(logprobs[0])


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.71, 2), (0.91, 3), (1 - 1e-12, 3)])
def test_noise_picks_by_cumulative_probability(u: float, token: int) -> None:
    assert draw(u)[0] == token


def test_logprob_is_that_of_the_distribution_drawn_from() -> None:
    assert draw(0.0)[1] == pytest.approx(np.log(0.5))
    sharpened = np.array([0.5, 0.2, 0.2, 0.1]) ** 2
    assert draw(0.0, temperature=0.5)[1] == pytest.approx(np.log(sharpened[0] / sharpened.sum()))
    assert draw(0.0, top_k=1)[1] == pytest.approx(0.0)
    # 0.5 and one 0.2 reach 0.7: the nucleus holds the token that crosses the mass
    assert draw(0.0, top_p=0.6)[1] == pytest.approx(np.log(0.5 / 0.7))


def test_greedy_ignores_noise_and_reports_temperature_one() -> None:
    assert draw(0.99, temperature=0.0) == (0, pytest.approx(np.log(0.5)))


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 0] = logits[0, 2] = float("-inf")
    for u in (0.0, 0.5, 1 - 1e-15):
        ids, logprobs = sample_tokens(
            logits, torch.tensor([u], dtype=torch.float64), torch.ones(1), torch.ones(1), torch.zeros(1)
        )
        assert ids.tolist() == [1]
        assert logprobs.tolist() == [0.0]


def test_rows_keep_their_own_settings() -> None:
    ids, logprobs = sample_tokens(
        LOGITS.repeat(3, 1),
        torch.tensor([0.95, 0.95, 0.95], dtype=torch.float64),
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([1.0, 1.0, 0.5]),
        torch.tensor([0, 0, 0]),
    )
    assert ids.tolist() == [3, 0, 0]
    assert logprobs.tolist() == pytest.approx([np.log(0.1), np.log(0.5), 0.0], abs=1e-6)


def test_noise_is_a_function_of_seed_task_rollout_and_step() -> None:
    key = SessionKey(task_id="a", rollout=1)
    same = turn_uniforms(7, key, 2, 8)
    assert (turn_uniforms(7, key, 2, 8) == same).all()
    # a longer turn begins with the same noise
    assert (turn_uniforms(7, key, 2, 16)[:8] == same).all()
    others = [
        turn_uniforms(8, key, 2, 8),
        turn_uniforms(7, SessionKey(task_id="b", rollout=1), 2, 8),
        turn_uniforms(7, SessionKey(task_id="a", rollout=2), 2, 8),
        turn_uniforms(7, key, 3, 8),
    ]
    assert all((other != same).any() for other in others)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"max_turn_tokens": 0},
    ],
)
def test_impossible_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        SamplingParams(**bad)
