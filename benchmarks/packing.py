"""Times forward and backward passes over groups of rollouts: padded, packed, and packed with shared prompts.

The groups are synthetic: prompts with one picture, answers of various lengths, all of random tokens, scored by a tiny
policy. Seconds are those of the processor, which other work on the machine disturbs less than the clock. Each pass runs
in a process of its own, forked behind the imports, so that its peak memory is its own; the ways take turns.

    python benchmarks/packing.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from opensearch_lightning.chat import ModelBatch, PackedBatch, TokenizedSample, collate, pack, plan_packs
from opensearch_lightning.models import build_tiny_checkpoint, load_policy, policy_logprobs
from opensearch_lightning.types import ImageInput

WAYS = ("padded", "packed", "packed + shared")
BUDGET = 74_576


def groups(n_groups: int, n_rollouts: int, policy: Any) -> list[list[TokenizedSample]]:
    """Prompts of about 450 tokens with a picture of 256 × 256 pixels (64 tokens), answers of 130 to 400."""
    source, config = random.Random(0), policy.config
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side = 256 // vision.patch_size
    n_pads = side**2 // vision.spatial_merge_size**2
    vocabulary = range(300, config.text_config.vocab_size)
    out = []
    for number in range(n_groups):
        picture = ImageInput(
            name="img_1",
            encoded=str(number).encode(),
            pixel_values=torch.randn(side**2, values),
            grid_thw=(1, side, side),
        )
        prompt = [config.vision_start_token_id, *[config.image_token_id] * n_pads, config.vision_end_token_id]
        prompt += source.choices(vocabulary, k=source.randint(370, 400))
        group = []
        for _ in range(n_rollouts):
            answer = source.choices(vocabulary, k=source.randint(130, 400))
            steps = [-1] * len(prompt) + [0] * len(answer)
            group.append(
                TokenizedSample(
                    token_ids=torch.tensor(prompt + answer), step_ids=torch.tensor(steps), images=(picture,)
                )
            )
        out.append(group)
    return out


def batches(way: str, samples: Sequence[TokenizedSample], policy: Any) -> list[ModelBatch | PackedBatch]:
    """The micro-batches of one pass; padded ones hold samples of similar length."""
    config = policy.config
    options = {"image_token_id": config.image_token_id, "merge_size": config.vision_config.spatial_merge_size}
    if way == "padded":
        ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
        micro = BUDGET // len(ordered[-1].token_ids)
        parts = [ordered[start : start + micro] for start in range(0, len(ordered), micro)]
        return [collate(part, pad_id=0, **options) for part in parts]
    if way == "packed":
        # pictures of different files make different prompts
        samples = [
            replace(sample, images=tuple(replace(image, encoded=str(number).encode()) for image in sample.images))
            for number, sample in enumerate(samples)
        ]
    plans = plan_packs(samples, BUDGET, **options)
    return [pack([samples[number] for number in members], **options) for members in plans]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, samples: Sequence[TokenizedSample], policy: Any, results: Any) -> None:
    """One warm pass, then one that counts: seconds, MiB above the start, model tokens, sum of the log-probabilities."""
    start = peak_mib()
    for _ in range(2):
        total, n_tokens, began = 0.0, 0, time.process_time()
        for batch in batches(way, samples, policy):
            logprobs, _ = policy_logprobs(policy, batch, batch.step_ids >= 0)
            logprobs.sum().backward()
            total += float(logprobs.detach().sum())
            n_tokens += batch.input_ids.numel()
        seconds = time.process_time() - began
    results.put((seconds, peak_mib() - start, n_tokens, total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=50_000)
        policy = load_policy(build_tiny_checkpoint(f"{folder}/tiny", ["".join(letters)]))
    policy.train()
    samples = [sample for group in groups(arguments.groups, arguments.rollouts, policy) for sample in group]
    context = multiprocessing.get_context("fork")
    found: dict[str, list[tuple[float, float, int, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(way, samples, policy, results))
            process.start()
            process.join()
            found[way].append(results.get())
    base = statistics.median(run[0] for run in found["padded"])
    for way, runs in found.items():
        seconds = statistics.median(run[0] for run in runs)
        memory, n_tokens, total = max(run[1] for run in runs), runs[0][2], runs[0][3]
        print(
            f"{way:16} {seconds:7.2f} s  {base / seconds:5.2f} times as fast  {memory:7.0f} MiB  {n_tokens:6} tokens  "
            f"sum of log-probabilities {total:.2f}"
        )


if __name__ == "__main__":
    main()
