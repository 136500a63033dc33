"""What rollouts that run ahead are worth when tools are slow: the same training with ``max_staleness`` 0 and 1.

    python benchmarks/async_rollouts.py --out runs/async_rollouts
    python benchmarks/async_rollouts.py --data runs/quickstart --policy runs/quickstart/sft/policy

Every tool call takes a lognormal time, a function of the call alone: the same in both runs. Prints, for each run,
sampled tokens of the trained trajectories over wall time, training included; the share of the time in which no batch
was on the engine, by wall clock and by the processor time of the engine's thread, which others on the machine do not
lengthen; and reward and accuracy of every update side by side. Beside the seconds of a step stands what is to be
expected of the parts of the synchronous run:

    in step:  tools of the slowest trajectory + engine + training
    ahead:    max(tools of the slowest trajectory / 2, engine, training)

Where engine and training share one busy processor, no more can be won than the tools' time. Writes
``async_rollouts.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from opensearch_lightning.callbacks import FatalStepMasking, ToolExecution
from opensearch_lightning.composition import compose_config, make
from opensearch_lightning.launch import build_shared
from opensearch_lightning.quickstart import Quickstart, Sizes
from opensearch_lightning.rollout import TransformersEngine
from opensearch_lightning.tools import CallKey, ImageBook
from opensearch_lightning.types import Action, RolloutBatch, ToolResult

SMALL = Sizes(sft_tasks=400, rl_tasks=200, val_tasks=8, test_tasks=8)


class SlowTools:
    """An executor each of whose tool calls first takes its time."""

    def __init__(self, executor: Any, *, median_s: float, sigma: float, cap_s: float, seed: int) -> None:
        self._executor = executor
        self._median_s, self._sigma, self._cap_s, self._seed = median_s, sigma, cap_s, seed
        self.waited_s: dict[tuple[str, int], float] = defaultdict(float)
        """Seconds of all calls of a rollout of a task."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def latency_s(self, key: CallKey) -> float:
        """Seconds that the call ``key`` takes."""
        name = f"{self._seed}\x1f{key.task_id}\x1f{key.rollout}\x1f{key.step}".encode()
        draw = np.random.default_rng(int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little"))
        return min(self._cap_s, float(draw.lognormal(math.log(self._median_s), self._sigma)))

    async def execute(self, action: Action, images: ImageBook, key: CallKey) -> ToolResult:
        """Wait, then carry the call out."""
        if action.kind == "tool_call":
            seconds = self.latency_s(key)
            self.waited_s[key.task_id, key.rollout] += seconds
            await asyncio.sleep(seconds)
        result: ToolResult = await self._executor.execute(action, images, key)
        return result


class Curve(L.Callback):
    """Reward, accuracy, tokens and seconds of each update; stands behind the callback that rolls out."""

    def __init__(self, engine: TransformersEngine, tools: SlowTools) -> None:
        self._engine, self._tools = engine, tools
        self._train_started_s = self._engine_s = 0.0
        self.rows: list[dict[str, float]] = []
        self.started_s = self.ended_s = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.started_s = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Training starts, as the rollouts are there."""
        self._train_started_s = time.thread_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Note the update."""
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        rewards = [row.reward for row in rows if row.reward is not None]
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        engine_s, self._engine_s = self._engine_s, self._engine.stats().processor_s
        self.rows.append(
            {
                "reward": sum(reward.total for reward in rewards) / max(1, len(rewards)),
                "accuracy": sum(reward.accuracy for reward in rewards) / max(1, len(rewards)),
                "tokens": float(sum(int((row.step_ids >= 0).sum()) for row in rows)),
                "trajectories": float(len(rows)),
                "at_s": time.perf_counter() - self.started_s,
                "slowest_tools_s": max((self._tools.waited_s[row.task_id, row.rollout] for row in rows), default=0.0),
                "engine_s": self._engine_s - engine_s,
                "train_s": time.thread_time() - self._train_started_s,
                "wait_s": logged["time/rollout_wait_s"],
                "idle_share": logged["time/engine_idle_share"],
                "staleness_mean": logged.get("rollout/staleness_mean", 0.0),
                "staleness_max": logged.get("rollout/staleness_max", 0.0),
                "spanning_fraction": logged.get("rollout/spanning_fraction", 0.0),
            }
        )
        self.ended_s = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """The run in numbers."""
        wall_s = self.ended_s - self.started_s
        steps_s = np.diff([0.0, *(row["at_s"] for row in self.rows)])
        return {
            "tokens_per_s": sum(row["tokens"] for row in self.rows) / wall_s,
            "idle_share": float(np.average([row["idle_share"] for row in self.rows], weights=steps_s)),
            "processor_share": sum(row["engine_s"] for row in self.rows) / wall_s,
            "step_s": wall_s / len(self.rows),
            "wall_s": wall_s,
            "updates": self.rows,
        }


def train(args: argparse.Namespace, max_staleness: int) -> dict[str, Any]:
    """One training run."""
    config = compose_config(
        [
            "experiment=quickstart_grpo",
            f"tools={args.tools}",
            "logger=csv",
            f"data_dir={args.data}",
            f"model.path={args.policy}",
            f"run_dir={args.out}/unused",
            f"seed={args.seed}",
            f"data.prompts_per_step={args.prompts}",
            f"trainer.max_steps={args.updates}",
            f"callbacks.rollout_generation.group_size={args.group_size}",
            f"callbacks.rollout_generation.max_turns={args.max_turns}",
            f"callbacks.rollout_generation.max_staleness={max_staleness}",
            f"rollout.engine.own_weights={'true' if max_staleness else 'false'}",
            f"rollout.engine.on_update={args.on_update}",
            *args.overrides,
        ]
    )
    executor = SlowTools(
        make("tools.executor", config["tools"]["executor"], {}),
        median_s=args.median_s,
        sigma=args.sigma,
        cap_s=args.cap_s,
        seed=args.seed,
    )
    shared = build_shared(config, given={"executor": executor})
    curve = Curve(shared["engine"], executor)
    callbacks = [
        ToolExecution(shared["executor"]),
        make("callbacks.rollout_generation", config["callbacks"]["rollout_generation"], shared),
        FatalStepMasking(mode="fatal"),
        curve,
    ]
    trainer = L.Trainer(
        max_steps=args.updates,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    trainer.fit(make("module", config["module"], shared), datamodule=make("data", config["data"], shared))
    return curve.figures()


def prepare(args: argparse.Namespace) -> None:
    """A small world and a policy that answers now and then, where none was given."""
    if args.policy is not None:
        return
    args.data = args.out / "quickstart"
    args.policy = args.data / "sft" / "policy"
    if not args.policy.exists():
        Quickstart(args.data, seed=args.seed, sizes=SMALL).fine_tune()


def expected_step_s(updates: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds of a step in step and one step ahead, by the parts of the updates of a run in step."""
    parts = [(row["slowest_tools_s"], row["engine_s"], row["train_s"]) for row in updates]
    in_step = sum(sum(part) for part in parts) / len(parts)
    tools_s, engine_s, train_s = (sum(column) / len(parts) for column in zip(*parts, strict=True))
    return in_step, max(tools_s / 2, engine_s, train_s)


def report(runs: dict[str, dict[str, Any]]) -> str:
    """Both runs as text."""
    before, after = runs.values()
    expected = expected_step_s(before["updates"])
    lines = [f"{'run':<16}{'tokens/s':>10}{'idle':>7}{'processor':>11}{'wall s':>9}{'step s':>9}{'expected':>10}"]
    for (name, run), step_s in zip(runs.items(), expected, strict=True):
        lines.append(
            f"{name:<16}{run['tokens_per_s']:>10.1f}{run['idle_share']:>7.0%}{run['processor_share']:>11.0%}"
            f"{run['wall_s']:>9.1f}{run['step_s']:>9.2f}{step_s:>10.2f}"
        )
    for part in ("slowest_tools_s", "engine_s", "train_s"):
        mean_s = sum(row[part] for row in before["updates"]) / len(before["updates"])
        lines.append(f"  {part} of a synchronous step: {mean_s:.2f}")
    lines += [f"tokens per second: x {after['tokens_per_s'] / before['tokens_per_s']:.2f}", ""]
    lines.append(f"{'update':<8}" + "".join(f"{name + ' reward':>22}{'accuracy':>10}{'at s':>8}" for name in runs))
    for number, rows in enumerate(zip(*(run["updates"] for run in runs.values()), strict=True)):
        cells = "".join(f"{row['reward']:>22.3f}{row['accuracy']:>10.3f}{row['at_s']:>8.1f}" for row in rows)
        lines.append(f"{number:<8}{cells}")
    return "\n".join(lines)


def main() -> None:
    """Run both trainings and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async_rollouts"))
    parser.add_argument("--data", type=Path, help="folder of a quickstart: world and shards")
    parser.add_argument("--policy", type=Path, help="checkpoint to start from; needs --data")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="tasks of one update")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-turns", type=int, default=6, help="a policy that fails on and on says nothing of speed")
    parser.add_argument("--tools", default="offline_faults", help="failing now and then, so that groups differ")
    parser.add_argument("--median-s", type=float, default=0.3)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--cap-s", type=float, default=20.0)
    parser.add_argument("--on-update", default="recompute", choices=["recompute", "keep"])
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of both runs")
    args = parser.parse_args()
    if (args.policy is None) != (args.data is None):
        parser.error("give --data and --policy, or neither")
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args)
    runs = {"synchronous": train(args, 0), "max_staleness=1": train(args, 1)}
    print(report(runs))
    (args.out / "async_rollouts.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
