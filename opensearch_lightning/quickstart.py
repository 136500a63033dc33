"""The whole recipe at small size: a world, an expert, SFT, fatal-aware GRPO among failing tools, and a table.

Every stage is what a user would run by hand: the training stages are ``opensearch train`` in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from opensearch_lightning.composition import compose_config, make
from opensearch_lightning.errors import ConfigurationError, OpenSearchError
from opensearch_lightning.evaluate import evaluate, read_tasks, summary_cell
from opensearch_lightning.evaluation import PassAt1, pass_at_1

CELLS = {
    "greedy": ("greedy", "offline"),
    "sampled": ("sampled", "offline"),
    "greedy_faults": ("greedy", "offline_faults"),
    "sampled_faults": ("sampled", "offline_faults"),
}
"""Column of the table: decoding and tools."""

HOPS = {2: 0.6, 3: 0.3, 4: 0.1}
"""Shorter walks than the recipe's: a tiny policy has a few hundred tokens."""

PICTURES = {
    "labelled": 0.80,
    "sign": 0.06,
    "emblem": 0.04,
    "small": 0.04,
    "scene": 0.02,
    "blurred": 0.02,
    "skewed": 0.02,
}
"""Mostly pictures that two tools can name: which one to rely on is for the policy to find out."""

SIDE_BY_SIDE = 0.92
"""Time of an SFT step beside GRPO over its time alone, set too small: SFT continued gets more steps than it needs."""

TITLES = {
    "greedy": "greedy",
    "sampled": "sampled",
    "greedy_faults": "greedy, faults",
    "sampled_faults": "sampled, faults",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything, and how the expert works; the defaults fit 15 minutes on two cores."""

    pages: int = 90
    sft_tasks: int = 1000
    expert_rollouts: int = 1
    rl_tasks: int = 800
    val_tasks: int = 48
    test_tasks: int = 200
    vocabulary: int = 2048
    expert_habit: float = 0.8
    expert_detour: float = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch quickstart``."""
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of everything that is made")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left in the folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all trainings and evaluations")


def run(args: argparse.Namespace) -> int:
    """Carry out ``opensearch quickstart``; returns the exit code."""
    if args.fresh:
        shutil.rmtree(args.out, ignore_errors=True)
    if args.out.exists():
        raise ConfigurationError(f"{args.out} exists; choose another --out, or --fresh to remove it first")
    started = time.perf_counter()
    quickstart = Quickstart(args.out, seed=args.seed, overrides=args.overrides)
    rows = quickstart.run()
    print(f"\n{render_table(rows)}\n")
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes in all; report: {args.out / 'report.html'}")
    return 0


class Quickstart:
    """One run of all stages in a folder.

    Args:
        out: folder to make.
        seed: of world, expert, training and evaluation.
        sizes: how much of everything.
        overrides: settings for all trainings and evaluations, in Hydra's grammar.
    """

    def __init__(
        self, out: Path, *, seed: int = 3407, sizes: Sizes | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.out = out
        self.seed = seed
        self.sizes = sizes or Sizes()
        self.overrides = list(overrides)

    def run(self) -> list[dict[str, Any]]:
        """All stages; returns the rows of the table, as ``evaluation.json`` holds them."""
        sft_s = self.fine_tune()
        with _stage("fatal-aware GRPO, and beside it SFT continued for as long"):
            seconds = self._train_side_by_side(sft_s)
        with _stage("evaluation on held-out tasks"):
            rows = self._evaluate()
        self._write(rows, {"sft_s": sft_s, **seconds})
        return rows

    def fine_tune(self) -> float:
        """The stages up to SFT alone, which end with ``sft/policy``; returns the seconds of SFT."""
        with _stage("world, expert trajectories, untrained model"):
            self._prepare()
        with _stage("supervised fine-tuning"):
            return self._train("sft", ["experiment=quickstart_sft"])

    # --- stages -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        from opensearch_lightning.data import write_rl_shards, write_sft_shards
        from opensearch_lightning.models import build_tiny_checkpoint
        from opensearch_lightning.world import build_world

        sizes = self.sizes
        splits = {"sft": sizes.sft_tasks, "rl": sizes.rl_tasks, "val": sizes.val_tasks, "test": sizes.test_tasks}
        world = build_world(
            self.out / "world",
            pages=sizes.pages,
            seed=self.seed,
            splits=splits,
            hop_probabilities=HOPS,
            pictures=PICTURES,
        )
        config = self._environment("offline_short_outages", model="none")
        rows = asyncio.run(self._expert_rows(config, world.tasks("sft")))
        texts = [*world.corpus_texts(), *(turn["value"] for row in rows for turn in row["conversations"])]
        # the names of the roles are in every turn, and in no page
        texts += ["system\nuser\nassistant\n"] * len(texts)
        build_tiny_checkpoint(self.out / "model", texts, vocab_size=sizes.vocabulary, seed=self.seed)
        write_sft_shards(rows, self.out / "shards" / "sft")
        for split in ("rl", "val", "test"):
            write_rl_shards(world.tasks(split), self.out / "shards" / split)

    async def _expert_rows(self, config: Mapping[str, Any], tasks: Sequence[Any]) -> list[dict[str, Any]]:
        from opensearch_lightning.rewards import ExactMatchJudge
        from opensearch_lightning.world.expert import ScriptedExpert

        executor = make("tools.executor", config["tools"]["executor"], {})
        settings = config["callbacks"]["rollout_generation"]
        expert = ScriptedExpert(
            executor,
            ExactMatchJudge(),
            system_prompt=settings["system_prompt"],
            fatal_k=settings["fatal_k"],
            max_turns=settings["max_turns"],
            habit=self.sizes.expert_habit,
            detour=self.sizes.expert_detour,
            seed=self.seed,
        )
        try:
            rows, statistics = await expert.collect(tasks, rollouts=self.sizes.expert_rollouts)
        finally:
            await executor.aclose()
        print(f"  expert: {statistics.kept} of {statistics.tried} rollouts kept; left out: {statistics.dropped}")
        return rows

    def _train(self, name: str, settings: Sequence[str]) -> float:
        """One training run in a process of its own; returns its seconds."""
        started = time.perf_counter()
        _finish(name, self._start(name, settings))
        return time.perf_counter() - started

    def _train_side_by_side(self, sft_s: float) -> dict[str, float]:
        """GRPO on one core and SFT on the other, which gets at least as long."""
        policy = f"model.path={self.out / 'sft' / 'policy'}"
        started = time.perf_counter()
        grpo = self._start("grpo", ["experiment=quickstart_grpo", policy])
        continued: subprocess.Popen[bytes] | None = None
        try:
            grpo_pace_s, done = self._pace("grpo", grpo)
            left = max(0, self._max_steps("quickstart_grpo") - done)
            grpo_estimate_s = time.perf_counter() - started + left * grpo_pace_s
            sft_pace_s, _ = self._pace("sft", None)
            steps = math.ceil(grpo_estimate_s / (SIDE_BY_SIDE * sft_pace_s))
            continued_started = time.perf_counter()
            settings = ["experiment=quickstart_sft", policy]
            continued = self._start("sft_continued", settings, fixed=[f"trainer.max_steps={steps}"])
            _finish("grpo", grpo)
            grpo_s = time.perf_counter() - started
            _finish("sft_continued", continued)
            return {"grpo_s": grpo_s, "sft_continued_s": time.perf_counter() - continued_started}
        finally:
            for process in (grpo, continued):
                if process is not None and process.poll() is None:
                    process.kill()

    def _evaluate(self) -> list[dict[str, Any]]:
        """Every row and column of the table, two processes side by side."""
        policies = {
            "untrained": self.out / "model",
            "after SFT": self.out / "sft" / "policy",
            "after GRPO": self.out / "grpo" / "policy",
            "SFT continued": self.out / "sft_continued" / "policy",
        }
        jobs = [
            (name, cell, self._environment(tools, model=path), decoding)
            for name, path in policies.items()
            for cell, (decoding, tools) in CELLS.items()
        ]
        off = "GRPO policy, tools off"
        off_config = self._environment("switched_off", model=policies["after GRPO"])
        jobs += [(off, cell, off_config, CELLS[cell][0]) for cell in ("greedy", "sampled")]
        rows: dict[str, dict[str, Any]] = {name: {"name": name, "cells": {}} for name, *_ in jobs}
        shards = self.out / "shards" / "test"
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            futures = [(name, cell, pool.submit(_measure, config, shards, how)) for name, cell, config, how in jobs]
            for name, cell, future in futures:
                rows[name]["cells"][cell] = asdict(future.result())
        return list(rows.values())

    def _write(self, rows: list[dict[str, Any]], seconds: Mapping[str, float]) -> None:
        from opensearch_lightning.dashboards import write_report

        meta = {"seed": self.seed, "temperature": self._temperature(), **{k: round(v, 1) for k, v in seconds.items()}}
        path = self.out / "evaluation.json"
        path.write_text(json.dumps({"rows": rows, "meta": meta}, indent=1) + "\n", encoding="utf-8")
        write_report([self.out / "sft", self.out / "grpo"], self.out / "report.html", evaluation=path)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _settings(self) -> list[str]:
        return [f"seed={self.seed}", f"data_dir={self.out}"]

    def _environment(self, tools: str, *, model: Path | str) -> dict[str, Any]:
        overrides = ["experiment=quickstart_grpo", f"tools={tools}", *self._settings(), f"model.path={model}"]
        return compose_config([*overrides, "logger=csv", *self.overrides])

    def _max_steps(self, experiment: str) -> int:
        overrides = [f"experiment={experiment}", *self._settings(), *self.overrides]
        return int(compose_config(overrides)["trainer"]["max_steps"])

    def _temperature(self) -> float:
        return float(self._environment("offline", model="none")["callbacks"]["rollout_generation"]["temperature"])

    def _start(self, name: str, settings: Sequence[str], fixed: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """A training run; ``fixed`` settings hold against the user's."""
        command = [sys.executable, "-m", "opensearch_lightning.cli", "train", *settings, *self._settings()]
        command += [f"run_dir={self.out / name}", f"name={name}", *self.overrides, *fixed]
        return subprocess.Popen(command, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})

    def _pace(self, name: str, process: subprocess.Popen[bytes] | None, *, rows: int = 4) -> tuple[float, int]:
        """Seconds of a training step, and steps done, from the run's metrics; waits for the first of a running process.

        The first step, which finds all caches cold, does not count if there are others.
        """
        path = self.out / name / "metrics.csv"
        while process is not None and process.poll() is None and len(_step_seconds(path)) < rows:
            time.sleep(1.0)
        seconds = _step_seconds(path)
        if not seconds:
            raise OpenSearchError(f"the training in {self.out / name} made no steps; its output above says why")
        counted = seconds[1:] or seconds
        return sum(counted) / len(counted), len(seconds)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Pass@1 in percent ± standard error, a line for each policy, as Markdown."""
    head = ["Pass@1 (%)", *TITLES.values(), "fatal under faults"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = {cell: PassAt1(**figures) for cell, figures in row["cells"].items()}
        faults = cells.get("sampled_faults")
        values = [summary_cell(cells[cell]) if cell in cells else "" for cell in TITLES]
        lines.append([row["name"], *values, f"{100 * faults.fatal_fraction:.0f}%" if faults else ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [" | ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)) for line in lines]
    n = next(iter(rows[0]["cells"].values()))["n"]
    return "\n".join(f"| {line} |" for line in text) + f"\n\nn = {n} held-out tasks; ± is one standard error."


def _measure(config: Mapping[str, Any], shards: Path, decoding: str) -> PassAt1:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return pass_at_1(evaluate(config, read_tasks(shards), decoding=decoding))


def _step_seconds(path: Path) -> list[float]:
    """Wall seconds of each training step so far, from a metrics file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return [float(row["time/step_s"]) for row in csv.DictReader(lines) if row.get("time/step_s")]


def _finish(name: str, process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    if code:
        raise OpenSearchError(f"the training {name!r} ended with exit code {code}; its output above says why")


@contextmanager
def _stage(title: str) -> Iterator[None]:
    print(f"== {title}", flush=True)
    started = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - started:.0f} s", flush=True)
