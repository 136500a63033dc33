"""Fine-tuning side by side with TRL's SFTTrainer: tokens per second, time to the first batch, memory of sharding.

    pip install -e '.[peers]'
    python benchmarks/sft.py --out runs/sft/figures.json             # all parts; some 20 minutes
    python benchmarks/sft.py --parts speed                           # tokens per second alone

TRL may also lie in a folder of its own on ``PYTHONPATH`` (``pip install --target``); the folder must then be named
``site-packages``.

``speed``: both train one tiny Qwen3-VL of random weights on the same made-up trajectories (``corpus.py``: several
turns, several pictures), as many of them an update, with the loss on the same tokens, AdamW, float32, one thread, one
heap, no gradient checkpointing, no worker processes. Each side runs in processes of its own, in turns. The first update
of a process is left out. Ours trains an epoch, so that padded and packed rows are the same ones, TRL some updates of
it. Before training, each side takes the loss of the same rows. Each draws its batches as it does
by default (TRL at random), and TRL, as a side of its own, from rows of similar length. The padding that is held against
its limit is that of a whole epoch of ours as planned.

``first``: from the start of a process to the first batch of a source of the released set's size. Ours reads shards
with the rows' lengths; TRL loads the JSON files, converts them to messages and collates. TRL also starts a second time,
with what ``datasets`` cached.

``memory``: ``opensearch shard`` on sources of two sizes; peak of each of its processes above what its imports take.

Prints a table for each part and exits with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import corpus
from peers import first_batch, sharding_memory
from peers.apart import run_apart, write_report
from peers.measure import table
from peers.sft_data import SFTSettings, make_policy, shard_command

MIN_SPEEDUP = 1.25
MAX_PADDING = 0.05
MAX_LOSS_DIFFERENCE = 1e-4
SIDES = ("ours, padded", "ours, packed", "TRL", "TRL, by length")
PARTS = ("speed", "first", "memory")

Reports = dict[str, list[dict[str, Any]]]
Verdict = tuple[str, bool]


def play(role: str, folder: Path) -> None:
    """What a process of its own does."""
    import torch

    torch.set_num_threads(1)
    if role in first_batch.ROLES:
        write_report(role, folder, first_batch.ROLES[role](folder))
        return
    settings = SFTSettings.read(folder)
    if role == "prepare":
        corpus.write_corpus(settings.corpus, rows=settings.rows, scale=settings.scale, pictures=0, seed=settings.seed)
        make_policy(settings.policy, settings.corpus, max_pixels=settings.max_pixels)
        subprocess.run(shard_command(settings.corpus, settings.shards, settings.policy), check=True)
        return
    write_report(role, folder, _runner(role)(settings))


def _runner(side: str) -> Callable[[SFTSettings], dict[str, Any]]:
    if side.startswith("ours"):
        from peers import our_sft

        return lambda settings: our_sft.run(settings, packed=side == "ours, packed")
    from peers import trl_sft

    sampling = "random" if side == "TRL" else "group_by_length"
    return lambda settings: trl_sft.run(settings, sampling=sampling)


def measure_speed(settings: SFTSettings, rounds: int, sides: Sequence[str]) -> Reports:
    """Reports of the processes of each side, run in turns."""
    folder = Path(settings.folder)
    settings.write()
    if not settings.shards.exists():
        run_apart(__file__, "prepare", folder)
    reports: Reports = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            reports[side].append(run_apart(__file__, side, folder))
            seconds = ", ".join(f"{step['step_s']:.2f}" for step in reports[side][-1]["steps"])
            print(f"round {number + 1}, {side}: {seconds} s", flush=True)
    return reports


def rate(report: dict[str, Any], seconds: str = "step_s") -> float:
    """Tokens a second that are no padding, without the first update."""
    steps = report["steps"][1:]
    tokens: float = sum(step["tokens"] for step in steps)
    return tokens / sum(step[seconds] for step in steps)


def padding(reports: Sequence[dict[str, Any]]) -> float:
    """Fraction of the places that the model read which held no token."""
    steps = [step for report in reports for step in report["steps"]]
    return 1 - sum(step["tokens"] for step in steps) / sum(step["places"] for step in steps)


def median(reports: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(figure, reports))


def speed_table(reports: Reports) -> str:
    """Tokens a second of each side, and what they are made of."""
    base = median(reports["TRL"], rate)
    rows = []
    for side, runs in reports.items():
        tokens = sum(step["tokens"] for step in runs[0]["steps"])
        whole = median(runs, rate)
        rows.append(
            [
                side,
                f"{whole:.0f}",
                f"{whole / base:.2f}",
                f"{median(runs, lambda report: rate(report, 'training_step_s')):.0f}",
                f"{median(runs, lambda report: rate(report, 'cpu_s')):.0f}",
                f"{padding(runs):.1%}",
                f"{tokens}",
                f"{max(run['peak_mb'] for run in runs):.0f}",
                f"{runs[0]['loss']:.6f}",
            ]
        )
    head = ["", "tokens/s", "to TRL", "without making batches", "a processor second", "padding", "tokens"]
    return table([*head, "peak MB", "loss"], rows)


def speed_verdicts(reports: Reports) -> list[Verdict]:
    """Each limit with its figure, and whether it holds."""
    rates = {side: median(runs, rate) for side, runs in reports.items()}
    padded, packed, peer = (rates[side] for side in SIDES[:3])
    runs = [run for side in reports.values() for run in side]
    difference = max(run["loss"] for run in runs) - min(run["loss"] for run in runs)
    same = len({(run["digest"], run["supervised"]) for run in runs}) == 1
    empty = reports["ours, padded"][0]["padding_of_epoch"]
    return [
        (f"without packing {padded / peer:.2f} times TRL (at least {MIN_SPEEDUP:g})", padded >= MIN_SPEEDUP * peer),
        (f"packed {packed / padded:.2f} times as fast as padded (at least 1)", packed >= padded),
        (f"padding of an epoch without packing {empty:.1%} (at most {MAX_PADDING:.0%})", empty <= MAX_PADDING),
        (
            f"losses of the same rows differ by {difference:.1e} (at most {MAX_LOSS_DIFFERENCE:.0e})",
            difference <= MAX_LOSS_DIFFERENCE,
        ),
        ("the compared rows are the same tokens, and the same of them supervised, on all sides", same),
    ]


def arguments_of_the_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/sft"), help="for corpora, shards and logs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch", type=int, default=8, help="trajectories of an update")
    parser.add_argument("--steps", type=int, default=10, help="updates of TRL behind the first")
    parser.add_argument("--scale", type=float, default=0.3, help="length of the trajectories; 1 for some 5,500 tokens")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side, in turns")
    parser.add_argument("--rows", type=int, default=corpus.RELEASED_ROWS, help="of the source for the first batch")
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments_of_the_command()
    if options.role:
        play(options.role, options.folder)
        return 0
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install -e '.[peers]'")
    figures: dict[str, Any] = {}
    verdicts: list[Verdict] = []
    if "speed" in options.parts:
        settings = SFTSettings(
            folder=str(options.folder), batch=options.batch, steps=options.steps, scale=options.scale
        )
        reports = measure_speed(settings, options.rounds, SIDES)
        print(f"\n{speed_table(reports)}\n", flush=True)
        figures["speed"] = reports
        verdicts += speed_verdicts(reports)
    for part, module in (("first", first_batch), ("memory", sharding_memory)):
        if part in options.parts:
            figures[part] = module.measure(__file__, options.folder, options.rows)
            print(f"\n{table(*module.rows_of(figures[part]))}\n", flush=True)
            verdicts += module.verdicts(figures[part])
    for text, holds in verdicts:
        print(f"{'kept' if holds else 'MISSED'}: {text}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figures["limits"] = [{"limit": text, "holds": holds} for text, holds in verdicts]
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not all(holds for _, holds in verdicts))


if __name__ == "__main__":
    sys.exit(main())
