"""What JudgeLogging logs, and when it closes."""

from types import SimpleNamespace

import lightning as L
import pytest

from opensearch_lightning.callbacks import JudgeLogging, RolloutGeneration
from opensearch_lightning.data import SearchVLRLDataModule
from opensearch_lightning.errors import JudgeUnavailable
from opensearch_lightning.models import load_policy, load_processor
from opensearch_lightning.modules import FatalAwareGRPO
from opensearch_lightning.rewards import CompositeReward, ExactMatchJudge, JudgeFailure, JudgeMetrics, LexicalQueryJudge
from opensearch_lightning.rollout import TransformersEngine
from opensearch_lightning.tools import ToolExecutor, offline_tools
from opensearch_lightning.types import RewardParts, RolloutBatch, TrajectoryGroup
from tests.rewards.steps import TASK, answer, trajectory


class Metered:
    """A judge with figures to give out, one after another, that counts how often it was closed."""

    def __init__(self, *metrics):
        self.metrics, self.closed = list(metrics), 0

    async def judge(self, question, response, reference):
        return True

    def drain(self):
        return self.metrics.pop(0)

    async def aclose(self):
        self.closed += 1


def logged(callback, *visual):
    rows = []
    module = SimpleNamespace(log_dict=lambda figures, **_: rows.append(dict(figures)))
    runs = []
    for score in visual:
        reward = None if score == "failed" else RewardParts(total=1, format=1, accuracy=1, query=1, visual=score)
        runs.append(SimpleNamespace(**{**vars(trajectory(answer())), "reward": reward}))
    batch = RolloutBatch(tasks=[TASK], groups=[TrajectoryGroup(task=TASK, trajectories=tuple(runs))])
    callback.on_train_batch_end(None, module, None, batch, 0)
    return rows[0]


def test_the_figures_of_each_judge_and_what_was_spent_so_far():
    first = JudgeMetrics(
        calls=8,
        cache_hits=2,
        requests=9,
        retries=1,
        unreadable=2,
        failures={JudgeFailure.TIMEOUT: 1},
        input_tokens=900,
        output_tokens=90,
        cost=0.5,
        latency_p50_s=1.0,
        latency_p95_s=3.0,
    )
    judge = Metered(first, JudgeMetrics(calls=1, cost=0.25))
    callback = JudgeLogging(CompositeReward(judge, LexicalQueryJudge()))
    assert logged(callback) == {
        "judges/accuracy/calls": 8,
        "judges/accuracy/cache_hits": 2,
        "judges/accuracy/requests": 9,
        "judges/accuracy/retries": 1,
        "judges/accuracy/unreadable": 2,
        "judges/accuracy/failures/timeout": 1,
        "judges/accuracy/input_tokens": 900,
        "judges/accuracy/output_tokens": 90,
        "judges/accuracy/cost": 0.5,
        "judges/accuracy/latency_p50_s": 1.0,
        "judges/accuracy/latency_p95_s": 3.0,
        "judges/accuracy/cost_total": 0.5,
    }
    second = logged(callback)
    assert (second["judges/accuracy/cost"], second["judges/accuracy/cost_total"]) == (0.25, 0.75)
    assert "judges/accuracy/latency_p50_s" not in second


def test_without_a_price_there_is_no_cost():
    figures = logged(JudgeLogging(CompositeReward(Metered(JudgeMetrics(calls=1)), LexicalQueryJudge())))
    assert figures["judges/accuracy/calls"] == 1
    assert not [name for name in figures if "cost" in name]


def test_embedded_judges_have_nothing_to_log():
    reward = CompositeReward(ExactMatchJudge(), LexicalQueryJudge())
    assert logged(JudgeLogging(reward), None) == {}
    assert logged(JudgeLogging(reward), 0.5, None, 1.0, "failed") == {"train/reward_visual": 0.75}


def test_judges_are_closed_at_the_end():
    judge = Metered()
    JudgeLogging(CompositeReward(judge, LexicalQueryJudge())).teardown(None, None, "fit")
    assert judge.closed == 1


class Unavailable:
    """A reward whose judge failed too often."""

    closed = 0

    async def score(self, task, trajectory):
        raise JudgeUnavailable("judge small (accuracy/1) failed on 16 of its last 16 judgements")

    async def aclose(self):
        self.closed += 1


def test_a_run_whose_judge_is_unavailable_stops_with_its_message(tiny, tiny_world):
    policy = load_policy(tiny["model"])
    engine, reward = TransformersEngine(policy, load_processor(tiny["model"])), Unavailable()
    rollouts = RolloutGeneration(
        engine, ToolExecutor(offline_tools(tiny_world)), reward, group_size=2, max_turn_tokens=4, max_turns=1
    )
    trainer = L.Trainer(
        max_steps=1,
        callbacks=[rollouts, JudgeLogging(reward)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = SearchVLRLDataModule(tiny["rl"], prompts_per_step=1)
    with pytest.raises(JudgeUnavailable, match="16 of its last 16"):
        trainer.fit(FatalAwareGRPO(policy), datamodule=data)
    assert reward.closed == 1
