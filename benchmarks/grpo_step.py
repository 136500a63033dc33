"""Seconds of a GRPO step, side by side with TRL's GRPOTrainer.

    pip install -e '.[peers]'
    python benchmarks/grpo_step.py --out runs/grpo_step/figures.json

TRL may also lie in a folder of its own on ``PYTHONPATH`` (``pip install --target``); the folder must then be named
``site-packages``, without which TRL's data sets fail to pickle parts of pyarrow.

Both train one tiny Qwen3-VL, which is first taught to solve a search task in four turns (three tool calls, one of which
shows a picture), on the same prompts: 8 prompts a step, 8 rollouts each, all sampled at temperature 1 and all with an
advantage, AdamW without KL, one update a step, as many tokens a pass as 8 rollouts have, float32, one thread, one heap
(MALLOC_ARENA_MAX=1), no gradient checkpointing. Each side runs in processes of its own, in turns, so that the machine's
drift meets both. The first step of a process is left out; the others have tools that return at once and tools that take
0.1 s, in turns.

Prints three tables and exits with 1 when a limit is missed: a step at least twice as fast, at most 0.5 s more when a
tool takes 0.1 s, and no more memory than TRL.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.measure import Settings, table

MIN_SPEEDUP = 2.0
MAX_TOOL_S = 0.5
SIDES = {"ours": "peers.our_grpo", "TRL": "peers.trl_grpo"}

Step = dict[str, float]


def parts(step: Step) -> dict[str, float]:
    """Where the seconds of a step went. Tools run inside generation."""
    if "update_s" in step:
        generation, update = step["generation_s"], step["update_s"]
        forward = update - step["backward_s"]
        return {
            "generation and tools": generation,
            "preparing": 0.0,
            "forward": forward,
            "backward": step["backward_s"],
            "rest": step["step_s"] - generation - update,
        }
    backward = step["training_step_s"] - step["prepare_s"] - step["forward_s"]
    return {
        "generation and tools": step["generation_s"],
        "preparing": step["prepare_s"] - step["generation_s"],
        "forward": step["forward_s"],
        "backward": backward,
        "rest": step["step_s"] - step["training_step_s"],
    }


def measure(settings: Settings, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Reports of the processes of either side, run in turns."""
    folder = Path(settings.folder)
    settings.write(folder / "settings.json")
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in SIDES:
            in_process(name, folder)
            report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            reports[name].append(report)
            seconds = ", ".join(f"{step['step_s']:.2f}" for step in report["steps"])
            print(f"round {number + 1}, {name}: {seconds} s", flush=True)
    return reports


def in_process(role: str, folder: Path) -> None:
    """Run one role of this script in a process of its own, on one thread; its output is shown when it fails."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # one heap for all threads of either side, as the Makefile sets it: with one each, what a thread frees lies idle
    threads = {
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--role", role, "--folder", str(folder)]
    log = folder / f"{role}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command, env=os.environ | threads | {"PYTHONPATH": path}, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"{role} ended with exit code {code}:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def play(role: str, folder: Path) -> None:
    """What a process of its own does."""
    import torch

    torch.set_num_threads(1)
    settings = Settings.read(folder / "settings.json")
    if role == "policy":
        from peers.search_task import make_towns
        from peers.teach_policy import teach_policy

        teach_policy(settings.policy, make_towns(settings.task_count()), steps=settings.teaching_steps)
        return
    report = importlib.import_module(SIDES[role]).run(settings)
    (folder / f"{role}.json").write_text(json.dumps(report), encoding="utf-8")


def measured(reports: Sequence[dict[str, Any]], tool_s: float) -> list[Step]:
    """The steps of one side with one tool time, without each process's first."""
    return [step for report in reports for step in report["steps"][1:] if step["tool_s"] == tool_s]


def median(steps: Sequence[Step], figure: Callable[[Step], float]) -> float:
    return statistics.median(figure(step) for step in steps)


def time_table(reports: dict[str, list[dict[str, Any]]], tool_s: float) -> str:
    """Median seconds of a step and its parts."""
    steps = {name: measured(side, tool_s) for name, side in reports.items()}
    names = ["step", *parts(steps["TRL"][0]), "processor time of the step"]

    def seconds(side: str, part: str) -> float:
        whole = {"step": "step_s", "processor time of the step": "cpu_s"}
        return median(steps[side], lambda step: step[whole[part]] if part in whole else parts(step)[part])

    rows = []
    for part in names:
        ours, theirs = seconds("ours", part), seconds("TRL", part)
        ratio = f"{theirs / ours:.1f}" if ours > 0.005 else ""
        rows.append([part, f"{ours:.2f}", f"{theirs:.2f}", ratio])
    return table([f"seconds, tools of {tool_s:g} s", "ours", "TRL", "TRL / ours"], rows)


def size_table(reports: dict[str, list[dict[str, Any]]]) -> str:
    """What was sampled, and the memory."""

    def row(title: str, form: str, figure: Callable[[Step], float]) -> list[str]:
        values = [median([s for r in side for s in r["steps"][1:]], figure) for side in reports.values()]
        return [title, *(form.format(value) for value in values)]

    def memory(title: str, figure: Callable[[dict[str, Any]], float]) -> list[str]:
        return [title, *(f"{max(map(figure, side)):.0f}" for side in reports.values())]

    rows = [
        row("rollouts a step", "{:.0f}", lambda step: step["rollouts"]),
        row("turns", "{:.2f}", lambda step: step["turns"]),
        row("rollouts of four turns", "{:.0%}", lambda step: step["whole"]),
        row("prompt tokens", "{:.0f}", lambda step: step["prompt_tokens"] / step["rollouts"]),
        row("completion tokens", "{:.0f}", lambda step: step["completion_tokens"] / step["rollouts"]),
        row("of these sampled", "{:.0f}", lambda step: step["sampled_tokens"] / step["rollouts"]),
    ]
    quick = {name: measured(side, 0.0) for name, side in reports.items()}
    rate = [median(steps, lambda step: step["sampled_tokens"] / step["generation_s"]) for steps in quick.values()]
    rows.append(["sampled tokens/s of generation", *(f"{value:.0f}" for value in rate)])
    rows.append(memory("peak memory, MB", lambda report: report["peak_mb"]))
    rows.append(memory("above what is loaded before the first step, MB", training_mb))
    rows.append(["prompts' digest", *(side[0]["prompts"] for side in reports.values())])
    return table(["", *reports], rows)


def training_mb(report: dict[str, Any]) -> float:
    return report["peak_mb"] - report["loaded_mb"]


def verdicts(reports: dict[str, list[dict[str, Any]]], tool_s: float) -> list[tuple[str, bool]]:
    """Each limit with its figure, and whether it holds."""

    def step_s(side: str, tool: float) -> float:
        return median(measured(reports[side], tool), lambda step: step["step_s"])

    speedup = step_s("TRL", 0.0) / step_s("ours", 0.0)
    added = {side: step_s(side, tool_s) - step_s(side, 0.0) for side in reports}
    peak = {side: max(report["peak_mb"] for report in reports[side]) for side in reports}
    growth = {side: max(map(training_mb, reports[side])) for side in reports}
    same = len({report["prompts"] for side in reports.values() for report in side}) == 1
    return [
        (f"a step is {speedup:.2f} times as fast (at least {MIN_SPEEDUP:g})", speedup >= MIN_SPEEDUP),
        (
            f"tools of {tool_s:g} s add {added['ours']:.2f} s a step, TRL {added['TRL']:.2f} (at most {MAX_TOOL_S:g})",
            added["ours"] <= MAX_TOOL_S,
        ),
        (f"peak memory {peak['ours']:.0f} MB, TRL {peak['TRL']:.0f}", peak["ours"] <= peak["TRL"]),
        (
            f"of it above what is loaded {growth['ours']:.0f} MB (TRL: {growth['TRL']:.0f})",
            growth["ours"] <= growth["TRL"],
        ),
        ("the first prompts are the same tokens on both sides", same),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/grpo_step"), help="its policy is taught once")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="measured in a process, with each tool time")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--tool-seconds", type=float, default=0.1)
    parser.add_argument("--micro-batch", type=int, default=8, help="rollouts of a forward and backward pass")
    parser.add_argument("--coroutines", action="store_true", help="tools that are coroutines instead of functions")
    parser.add_argument("--teaching-steps", type=int, default=220)
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--role", choices=["policy", *SIDES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options.role, options.folder)
        return 0
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install -e '.[peers]'")
    settings = Settings(
        folder=str(options.folder),
        prompts=options.prompts,
        group=options.group,
        steps=options.steps,
        tool_seconds=options.tool_seconds,
        micro_batch=options.micro_batch,
        coroutines=options.coroutines,
        teaching_steps=options.teaching_steps,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    settings.write(options.folder / "settings.json")
    if not (settings.policy / "config.json").exists():
        in_process("policy", options.folder)
    reports = measure(settings, options.rounds)
    for tool_s in (0.0, settings.tool_seconds):
        print(f"\n{time_table(reports, tool_s)}")
    print(f"\n{size_table(reports)}\n")
    found = verdicts(reports, settings.tool_seconds)
    for text, holds in found:
        print(f"{'kept' if holds else 'MISSED'}: {text}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"reports": reports, "limits": [{"limit": text, "holds": holds} for text, holds in found]}
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not all(holds for _, holds in found))


if __name__ == "__main__":
    sys.exit(main())
