"""Times of updates and rollouts, by hand."""

import dataclasses

import pytest

from opensearch_lightning.models.flops import training_flops
from opensearch_lightning.planning import Assumptions, Figures
from opensearch_lightning.planning.clusters import CLUSTERS
from opensearch_lightning.planning.rollouts import count_rollouts
from opensearch_lightning.planning.training import count_scoring, count_training, group_forward_flops, group_tokens
from tests.planning.setups import setup_of

H20 = CLUSTERS["h20"]
SFT, GRPO = setup_of("experiment=sft_8b"), setup_of("experiment=grpo_8b")
P = 8_767_123_696


def test_an_update_of_fine_tuning() -> None:
    assumed = Assumptions(mfu=0.5)
    training = count_training(SFT, Figures(), H20, assumed)
    row = training_flops(SFT.shape, lengths=[11_500], supervised=2000, patches=[1024] * 3)
    assert training.flops == pytest.approx(256 * row)
    assert training.compute == pytest.approx(row / (148e12 * 0.5))
    assert (training.updates, training.trajectories, training.tokens, training.passes) == (1144, 256, 256 * 11_500, 1)
    # weights gathered for the forward and the backward pass, gradients once; 31 of 32 parts come from other nodes
    assert training.gathered == 3 * 2 * P
    assert training.communication == pytest.approx(6 * P * 31 / 32 / 200e9)
    assert training.bound == "compute"
    assert training.network_needed == pytest.approx(6 * P * 31 / 32 / training.compute)


def test_a_slow_network_is_what_an_update_waits_for() -> None:
    slow = dataclasses.replace(H20, network=2e9)
    training = count_training(SFT, Figures(), slow, Assumptions())
    assert training.bound == "communication"
    assert training.seconds == training.communication > training.compute
    assert training.seconds_apart == training.communication + training.compute


def test_one_node_hands_on_over_nvlink() -> None:
    one = dataclasses.replace(SFT, nodes=1)
    training = count_training(one, Figures(), H20, Assumptions(network=0.5))
    assert training.communication == pytest.approx(6 * P * 7 / 8 / 450e9 / 0.5)
    assert training.network_needed == 0


def test_the_longest_rows_hold_an_update_up() -> None:
    training = count_training(SFT, Figures(), H20, Assumptions())
    scale = 32_000 / 11_500
    row = training_flops(
        SFT.shape, lengths=[32_000], supervised=round(2000 * scale), patches=[1024] * round(300 * scale)
    ) - training_flops(SFT.shape, lengths=[], supervised=0, patches=[1024] * round(300 * scale))
    images = training_flops(SFT.shape, lengths=[], supervised=0, patches=[1024] * round(300 * scale)) / 100
    assert training.compute_longest == pytest.approx((row + images) / (148e12 * 0.35), rel=1e-4)


def test_measured_lengths_count_with_their_squares() -> None:
    even = count_training(SFT, Figures(mean_tokens=8000, lengths=[8000, 8000]), H20, Assumptions())
    uneven = count_training(SFT, Figures(mean_tokens=8000, lengths=[1000, 15_000]), H20, Assumptions())
    attended = 3 * 2 * 36 * 4096 * 256 / 2
    assert uneven.flops - even.flops == pytest.approx(attended * (1000**2 + 15_000**2 - 2 * 8000**2))


def test_packs_and_passes() -> None:
    packed = dataclasses.replace(SFT, packed=True, full_packs=True, rows_per_rank=2, max_tokens=46_000)
    training = count_training(packed, Figures(), H20, Assumptions())
    assert training.trajectories == 256 * 2 * 4
    assert (training.passes, training.compute_longest) == (2, 0)
    padded = dataclasses.replace(SFT, rows_per_rank=6, rows_per_pass=4)
    assert count_training(padded, Figures(), H20, Assumptions()).passes == 2


def test_zero2_gathers_no_weights_in_a_pass() -> None:
    two = dataclasses.replace(SFT, zero=dataclasses.replace(SFT.zero, stage=2))
    assert count_training(two, Figures(), H20, Assumptions()).gathered == 2 * 2 * P


def test_epochs_end_a_run() -> None:
    by_epochs = dataclasses.replace(SFT, max_steps=None, max_epochs=8)
    assert count_training(by_epochs, Figures(), H20, Assumptions()).updates == 1144


def test_rollouts_of_a_task_share_their_prompt() -> None:
    figures = Figures(images_per_row=0, mean_tokens=10_000, prompt_tokens=4000, sampled_tokens=2000)
    assert group_tokens(GRPO, figures) == 4000 + 8 * 6000
    flops = group_forward_flops(GRPO, figures)
    mlp = 2 * 36 * 3 * 4096 * 12_288
    assert flops["mlp"] == mlp * (4000 + 8 * 6000)
    assert flops["attended"] == 2 * 36 * 4096 * (8 * 10_000**2 - 7 * 4000**2)
    assert flops["output_layer"] == 2 * 4096 * 151_936 * 8 * 2000


def test_updates_of_a_grpo_step() -> None:
    training = count_training(GRPO, Figures(), H20, Assumptions())
    assert (training.updates, training.updates_per_step, training.trajectories) == (800, 4, 64 * 8)
    # 60,500 tokens of a task, 64 tasks, 32 ranks
    assert training.tokens == 64 * (4500 + 8 * 7000)
    assert training.passes == 2
    scoring = count_scoring(GRPO, Figures(), H20, Assumptions())
    assert scoring == pytest.approx(training.compute / 3 * 4)
    assert count_scoring(dataclasses.replace(GRPO, scoring_passes=0), Figures(), H20, Assumptions()) == 0


def test_decoding_waits_for_memory() -> None:
    figures, assumed = Figures(), Assumptions(decoding=1.0)
    rollouts = count_rollouts(GRPO, figures, H20, assumed)
    language = sum(GRPO.shape.parameters()[part] for part in ("attention", "mlp", "norms", "output_layer"))
    cache = 2 * 36 * 8 * 128 * 2
    read = 2 * language + 32 * 8000 * cache
    assert rollouts.token_seconds == pytest.approx(read / (4 * 4e12))
    assert rollouts.decoding == pytest.approx(2048 * 2000 / (8 * 32) * rollouts.token_seconds)
    assert rollouts.tools == pytest.approx(6.3 * 3)
    assert rollouts.seconds == rollouts.decoding + rollouts.prefill + rollouts.tools


def test_decoding_many_sequences_waits_for_products() -> None:
    slow = dataclasses.replace(H20, flops=148e9)
    rollouts = count_rollouts(GRPO, Figures(), slow, Assumptions(mfu=0.5))
    language = sum(GRPO.shape.parameters()[part] for part in ("attention", "mlp", "output_layer"))
    assert rollouts.token_seconds == pytest.approx(2 * language * 32 / (4 * 148e9 * 0.5))


def test_a_batch_reads_the_experts_it_chooses() -> None:
    mixture = setup_of("experiment=grpo_30b_a3b")
    short = Figures(prompt_tokens=1, mean_tokens=1, sampled_tokens=1)
    alone = count_rollouts(mixture, short, H20, Assumptions(max_sequences=1))
    batch = count_rollouts(mixture, short, H20, Assumptions(max_sequences=32))
    experts = 2 * mixture.shape.parameters()["experts"] / (4 * 4e12 * 0.6)
    chosen = 1 - (1 - 8 / 128) ** 32
    assert batch.token_seconds - alone.token_seconds == pytest.approx(experts * (chosen - 8 / 128), rel=0.01)
