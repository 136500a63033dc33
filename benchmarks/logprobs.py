"""Time and memory of log-probabilities with their gradients, against torch's chunked cross-entropy.

    python benchmarks/logprobs.py                      # 32,768 tokens; some 20 minutes on one core
    python benchmarks/logprobs.py --tokens 2048        # to try it
    python benchmarks/logprobs.py --peer-chunk-size 0  # torch's own choice of a chunk size

Each measurement is a process of its own that makes the inputs, runs a small case to warm up, and then one forward and
backward pass. Variants take turns, ``--repeats`` rounds of them, and the median of a variant counts; ratios are of the
rounds, so that a slower minute of the machine slows all variants of a round.

Memory is the growth of the process's peak resident memory (``VmHWM`` of ``/proc/self/status``, set back through
``/proc/self/clear_refs``) over what it held before the pass, less the gradients of both inputs, which no variant can
do without. Prints one table; exits with 1 when a limit is missed, or when values or gradients differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

from opensearch_lightning.algorithms import token_logprobs

OURS, ENTROPY, PEER = "token_logprobs", "token_logprobs, with entropy", "torch linear_cross_entropy"
TIME_LIMITS = {OURS: 1.1, ENTROPY: 1.5}
MEMORY_LIMIT_GIB = 1.0
WARM_UP_TOKENS = 64


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, _chunk_size: int) -> Tensor:
    """The sum of the log-probabilities."""
    return token_logprobs(hidden, weight, targets, with_entropy=False)[0].sum()


def ours_with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, _chunk_size: int) -> Tensor:
    """The same with entropies, which take part in the gradient."""
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    assert entropy is not None
    return logprobs.sum() + 0.01 * entropy.sum()


def peer(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """What torch has for it; without entropy, which it does not compute."""
    options = LinearCrossEntropyOptions(batch_chunk_size=chunk_size) if chunk_size else LinearCrossEntropyOptions()
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).sum()


VARIANTS: Mapping[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    OURS: ours,
    ENTROPY: ours_with_entropy,
    PEER: peer,
}


def inputs(tokens: int, vocabulary: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and matrix that make logits of about a unit of variance, and targets."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=draw).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=draw).div_(hidden_size**0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw)


def resident_gib(field: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 2**20
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark runs on Linux")


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds, those of the processor, and GiB of one pass, in this process."""
    run = VARIANTS[variant]
    warm = inputs(WARM_UP_TOKENS, arguments.vocabulary, arguments.hidden)
    run(*warm, arguments.peer_chunk_size).backward()
    del warm
    hidden, weight, targets = inputs(arguments.tokens, arguments.vocabulary, arguments.hidden)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_gib("VmRSS")
    started, busy = time.perf_counter(), time.process_time()
    run(hidden, weight, targets, arguments.peer_chunk_size).backward()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size() / 2**30
    return {"seconds": seconds, "busy": busy, "gib": resident_gib("VmHWM") - before - gradients}


def measured_apart(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, __file__, "--variant", variant, "--threads", str(arguments.threads)]
    for name in ("tokens", "vocabulary", "hidden", "peer_chunk_size"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def largest_difference() -> float:
    """Of values and gradients from those of a full float64 log-softmax, at a small size, relative to the largest."""
    hidden, weight, targets = inputs(1100, 5000, 32)
    weights = torch.linspace(-1, 1, len(targets))
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    assert entropy is not None
    got = (logprobs, entropy, *torch.autograd.grad(((logprobs + entropy) * weights).sum(), (hidden, weight)))
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    distribution = torch.log_softmax(hidden @ weight.T, -1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    exact = (logprobs, entropy, *torch.autograd.grad(((logprobs + entropy) * weights).sum(), (hidden, weight)))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, exact, strict=True))


def arguments_of_the_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-chunk-size", type=int, default=1024, help="0 for torch's own choice")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one alone, as JSON")
    return parser.parse_args()


def main() -> int:
    arguments = arguments_of_the_command()
    torch.set_num_threads(arguments.threads)
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments)))
        return 0
    difference = largest_difference()
    rounds = [{variant: measured_apart(variant, arguments) for variant in VARIANTS} for _ in range(arguments.repeats)]
    missed = difference > 1e-5
    print("| forward and backward pass | seconds | processor | ratio to torch | limit | memory GiB | limit | met |")
    print("|---|---|---|---|---|---|---|---|")
    for variant in VARIANTS:
        seconds = statistics.median(one[variant]["seconds"] for one in rounds)
        busy = statistics.median(one[variant]["busy"] for one in rounds)
        ratio = statistics.median(one[variant]["seconds"] / one[PEER]["seconds"] for one in rounds)
        memory = max(one[variant]["gib"] for one in rounds)
        limit = TIME_LIMITS.get(variant)
        met = limit is None or (ratio <= limit and memory <= MEMORY_LIMIT_GIB)
        missed |= not met
        limits = ("", "", "") if limit is None else (f"{limit:g}", f"{MEMORY_LIMIT_GIB:g}", "yes" if met else "no")
        print(
            f"| {variant} | {seconds:.2f} | {busy:.2f} | {ratio:.2f} | {limits[0]} | {memory:.3f} | {limits[1]} "
            f"| {limits[2]} |"
        )
    naive = arguments.tokens * arguments.vocabulary * 4 * 3 / 2**30
    print(
        f"\n{arguments.tokens} tokens, vocabulary {arguments.vocabulary}, hidden {arguments.hidden}, float32, "
        f"{arguments.threads} thread(s), median of {arguments.repeats}. Logits, their logarithmic softmax and their "
        f"gradient, held whole, would take {naive:.1f} GiB. Largest relative difference from float64 at a small size: "
        f"{difference:.1e} (limit 1e-5)."
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
