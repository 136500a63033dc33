"""Reading trajectories from shards and from files: samples per second, memory, and how full packs become.

    python benchmarks/shards.py --out runs/shards/figures.json       # 36,592 rows; some 20 minutes
    python benchmarks/shards.py --rows 2000 --samples 500            # to try it

Rows of a made-up corpus (``corpus.py``) of the released set's size are read in shuffled order, each way in a process of
its own and with 0, 1 and 2 workers: from shards, from shards and rendered to tokens and patches, and from files, whose
JSON is loaded whole before the first row and whose pictures are opened for each row. Memory is that of the process with
its workers, shared pages counted once (``Pss``), at its largest.

Then the whole corpus is planned in packs (``packing="tokens"``), of which some are made: the share of their budget that
holds tokens. Prints two tables and exits with 1 when that share is below 95%.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import corpus
from peers.apart import environment_of_a_role, run_apart, write_report
from peers.sft_data import make_policy, shard_command

MIN_EFFICIENCY = 0.95
WAYS = ("shards", "shards, rendered", "files")
WORKERS = (0, 1, 2)
PACK_TOKENS = 32_000
LOOK_EVERY = 50
_IMPORTS = {
    "shards": ("litdata", "opensearch_lightning.data"),
    "shards, rendered": ("litdata", "peers.our_sft"),
    "files": (),
}
"""What is loaded before the clock of the first row starts."""


def reader(way: str, folder: Path) -> tuple[Callable[[int], Any], int]:
    """A function that reads row ``index``, and the number of rows."""
    source = folder / "corpus"
    if way == "files":
        rows = [
            (path.parent, row)
            for path in corpus.source_files(source)
            for row in json.loads(path.read_text(encoding="utf-8"))
        ]

        def read_files(index: int) -> Any:
            images, row = rows[index]
            return row, [(images / name).read_bytes() for name in row["images"]]

        return read_files, len(rows)
    if way == "shards":
        from opensearch_lightning.data import ShardKind, ShardReader

        rows_of_shards = ShardReader(folder / "shards", kind=ShardKind.SFT)
        return rows_of_shards.__getitem__, len(rows_of_shards)
    from peers.our_sft import sample_source

    samples = sample_source(folder / "shards", folder / "policy")
    return samples.sample, len(samples)


class _Rows:
    """Rows in shuffled order, as a data set of PyTorch."""

    def __init__(self, read: Callable[[int], Any], order: list[int]) -> None:
        self._read, self._order = read, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> int:
        # only that it was read: what workers send back takes as long whichever way it was read
        self._read(self._order[place])
        return place


def read_rows(way: str, workers: int, folder: Path, samples: int) -> dict[str, Any]:
    """Seconds until rows can be read, samples a second from then on, and the peak of memory."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    bare_mb = pss_mb()
    for name in _IMPORTS[way]:
        importlib.import_module(name)
    started = time.perf_counter()
    read, n_rows = reader(way, folder)
    read(0)
    ready_s = time.perf_counter() - started
    order = random.Random(0).sample(range(n_rows), min(samples, n_rows))
    rows: Any = _Rows(read, order)
    peak_mb = pss_mb()
    started = time.perf_counter()
    for number, _ in enumerate(DataLoader(rows, batch_size=None, num_workers=workers)):
        if number % LOOK_EVERY == 0:
            peak_mb = max(peak_mb, pss_mb())
    seconds = time.perf_counter() - started
    return {"ready_s": ready_s, "rate": len(order) / seconds, "peak_mb": peak_mb, "bare_mb": bare_mb}


def pss_mb() -> float:
    """Memory of this process and its workers in MB, shared pages counted once."""
    total = 0
    for pid in ["self", *(child.pid for child in active_children())]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # it ended
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def pack_rows(folder: Path, updates: int) -> dict[str, Any]:
    """Plan an epoch in full packs and make the first ones: shares of the budget that hold tokens, and seconds."""
    import torch
    from peers import our_sft

    torch.set_num_threads(1)
    started = time.perf_counter()
    data = our_sft.data_module(folder / "shards", folder / "policy", batch=1, packing="tokens", pack_tokens=PACK_TOKENS)
    data.setup("fit")
    planned, steps = data.packing_efficiency, data.steps_per_epoch
    planned_s = time.perf_counter() - started
    stream = iter(data.train_dataloader())
    started = time.perf_counter()
    packs = [one for _ in range(updates) for one in next(stream).passes]
    tokens = sum(one.input_ids.numel() for one in packs)
    seconds = time.perf_counter() - started
    return {
        "planned": planned,
        "packs": steps,
        "planned_s": planned_s,
        "made": tokens / (PACK_TOKENS * len(packs)),
        "made_packs": len(packs),
        "tokens_s": tokens / seconds,
        "rows_s": sum(len(one.valid) for one in packs) / seconds,
    }


def play(role: str, folder: Path, samples: int) -> None:
    """What a process of its own does."""
    if role == "pack":
        write_report(role, folder, pack_rows(folder, updates=max(1, samples // 100)))
        return
    way, workers = role.rsplit(" ", 1)
    write_report(role, folder, read_rows(way, int(workers), folder, samples))


def prepare(folder: Path, rows: int) -> dict[str, float]:
    """Corpus, policy and shards, with the seconds that each took; what is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    steps: dict[str, tuple[Path, Callable[[], object]]] = {
        "corpus": (folder / "corpus", lambda: corpus.write_corpus(folder / "corpus", rows=rows)),
        "policy": (folder / "policy", lambda: make_policy(folder / "policy", folder / "corpus", max_pixels=262_144)),
        "shards": (
            folder / "shards",
            lambda: subprocess.run(
                shard_command(folder / "corpus", folder / "shards", folder / "policy", workers=2),
                env=environment_of_a_role(folder),
                check=True,
            ),
        ),
    }
    seconds = {}
    for name, (path, make) in steps.items():
        if not path.exists():
            started = time.perf_counter()
            make()
            seconds[name] = time.perf_counter() - started
            print(f"{name}: {seconds[name]:.0f} s", flush=True)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/shards"), help="for the corpus, its shards and logs")
    parser.add_argument("--rows", type=int, default=corpus.RELEASED_ROWS)
    parser.add_argument("--samples", type=int, default=2000, help="rows read each way")
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options.role, options.folder, options.samples)
        return 0
    figures: dict[str, Any] = {"seconds": prepare(options.folder, options.rows)}
    samples = ("--samples", str(options.samples))
    print("| rows from | workers | seconds to the first | samples/s | peak MB | of it above torch |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        for workers in WORKERS:
            found = figures[f"{way} {workers}"] = run_apart(__file__, f"{way} {workers}", options.folder, *samples)
            print(
                f"| {way} | {workers} | {found['ready_s']:.2f} | {found['rate']:.0f} | {found['peak_mb']:.0f} "
                f"| {found['peak_mb'] - found['bare_mb']:.0f} |",
                flush=True,
            )
    packs = figures["packs"] = run_apart(__file__, "pack", options.folder, *samples)
    print(f"\n| packs of {PACK_TOKENS} tokens | budget used | seconds to the plan | rows/s | tokens/s |")
    print("|---|---|---|---|---|")
    print(f"| planned, {packs['packs']:.0f} an epoch | {packs['planned']:.2%} | {packs['planned_s']:.1f} | | |")
    print(f"| made, {packs['made_packs']} | {packs['made']:.2%} | | {packs['rows_s']:.0f} | {packs['tokens_s']:.0f} |")
    # of few packs made, the one that ends the epoch half full would tell the most
    holds = packs["planned"] >= MIN_EFFICIENCY
    print(f"\n{'kept' if holds else 'MISSED'}: packs use at least {MIN_EFFICIENCY:.0%} of their budget")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
