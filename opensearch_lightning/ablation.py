"""The ablation of the paper (Table 3b): four arms of GRPO from the same policies among failing tools, over seeds.

Arms of one seed are paired: they start from one policy and meet the same tasks, sampling noise and faults. What is
finished is not run again, so a call goes on where an earlier one was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from opensearch_lightning.composition import compose_config
from opensearch_lightning.dashboards.ablation import ARMS, REFERENCE, START
from opensearch_lightning.dashboards.ablation_page import write_ablation
from opensearch_lightning.errors import ConfigurationError, OpenSearchError
from opensearch_lightning.evaluate import DECODINGS, evaluate, read_tasks
from opensearch_lightning.quickstart import Quickstart, Sizes


@dataclass(frozen=True, kw_only=True)
class Job:
    """One arm of one seed, in ``out/seed_<seed>/<arm>``."""

    out: Path
    seed: int
    arm: str
    overrides: tuple[str, ...] = ()

    @property
    def data(self) -> Path:
        """Folder of the seed: its world, shards and SFT policy."""
        return self.out / f"seed_{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the arm."""
        return self.data / self.arm

    def settings(self) -> list[str]:
        """Overrides of training and evaluation."""
        experiment = REFERENCE if self.arm == START else self.arm
        return [f"experiment=ablation/{experiment}", f"seed={self.seed}", f"data_dir={self.data}", *self.overrides]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch ablation``."""
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder of everything that is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="one policy and four arms each")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="all by default")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side, one core each")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the four arms' trainings")


def run(args: argparse.Namespace) -> int:
    """Carry out ``opensearch ablation``; returns the exit code."""
    if args.jobs < 1:
        raise ConfigurationError(f"--jobs is {args.jobs}; set 1 or more")
    table = run_ablation(args.out, args.seeds, arms=args.arms, jobs=args.jobs, overrides=args.overrides)
    print(f"\n{table}\nreport: {args.out / 'ablation.html'}")
    return 0


def run_ablation(
    out: Path,
    seeds: Sequence[int],
    *,
    arms: Sequence[str] = tuple(ARMS),
    jobs: int = 2,
    sizes: Sizes | None = None,
    sft_overrides: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> str:
    """All that is not finished yet, in the order of the seeds; returns the table as Markdown.

    Args:
        out: folder; a seed of it that was stopped before its SFT policy was there is made anew.
        seeds: of worlds, policies, trainings and evaluations.
        arms: names of ``conf/experiment/ablation``.
        jobs: processes side by side.
        sizes: of worlds and SFT.
        sft_overrides: settings of the SFT before the arms, in Hydra's grammar.
        overrides: settings of the arms, likewise.

    Raises:
        OpenSearchError: a training failed; its log is named.
    """
    # One thread each, since they run side by side; their processes read it when they load torch.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    _side_by_side(jobs, _prepare, [(out / f"seed_{seed}", seed, sizes, sft_overrides) for seed in seeds])
    todo = [Job(out=out, seed=seed, arm=arm, overrides=tuple(overrides)) for seed in seeds for arm in (START, *arms)]
    _side_by_side(jobs, _run_arm, [(job,) for job in todo])
    return write_ablation(out)


def _side_by_side(jobs: int, work: Callable[..., str], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Each call in turn, ``jobs`` at once, in processes; what they say is printed as they end."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(work, *given) for given in arguments]
        try:
            for future in as_completed(futures):
                if text := future.result():
                    print(text, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare(folder: Path, seed: int, sizes: Sizes | None, overrides: Sequence[str]) -> str:
    """World and SFT policy of a seed."""
    if (folder / "sft" / "policy").is_dir():
        return ""
    started = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    Quickstart(folder, seed=seed, sizes=sizes, overrides=overrides).fine_tune()
    return f"seed {seed}: world and SFT policy, {time.perf_counter() - started:.0f} s"


def _run_arm(job: Job) -> str:
    """Train an arm and measure its policy; the start is measured only."""
    result = job.folder / "result.json"
    if result.exists():
        return ""
    started = time.perf_counter()
    policy = job.data / "sft" / "policy"
    if job.arm != START:
        policy = job.folder / "policy"
        if not policy.is_dir():
            shutil.rmtree(job.folder, ignore_errors=True)
            _train(job)
    train_s = time.perf_counter() - started
    cells = {decoding: _measure(job, policy, decoding) for decoding in DECODINGS}
    seconds = {"train_s": round(train_s, 1), "evaluate_s": round(time.perf_counter() - started - train_s, 1)}
    job.folder.mkdir(parents=True, exist_ok=True)
    scratch = result.with_suffix(".tmp")
    scratch.write_text(json.dumps({"seed": job.seed, "arm": job.arm, "evaluation": cells, **seconds}, indent=1) + "\n")
    scratch.replace(result)
    accuracy = cells["sampled"]["accuracy"]
    return f"seed {job.seed}, {job.arm}: accuracy {100 * accuracy:.1f}%, {sum(seconds.values()):.0f} s"


def _train(job: Job) -> None:
    command = [sys.executable, "-m", "opensearch_lightning.cli", "train", *job.settings(), f"run_dir={job.folder}"]
    log = job.data / "logs" / f"{job.arm}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise OpenSearchError(f"the training in {job.folder} ended with exit code {code}; {log} says why")


def _measure(job: Job, policy: Path, decoding: str) -> dict[str, float]:
    """Figures of one rollout of each held-out task, among the faults of the training."""
    from opensearch_lightning.callbacks.curves import rollout_figures

    config = compose_config([*job.settings(), f"model.path={policy}", "logger=csv"])
    groups = evaluate(config, read_tasks(job.data / "shards" / "test"), decoding=decoding)
    (scores, n), (runs, _) = rollout_figures([t for group in groups for t in group.trajectories])
    if not n:
        raise OpenSearchError(f"no rollout of {policy} was judged; the warnings above say why")
    names = ("accuracy", "reward", "turns", "tool_calls", "fatal_fraction", "invalid_fraction")
    return {"n": n, **{name: value for name, value in (scores | runs).items() if name in names}}
