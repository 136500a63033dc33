"""Does each stage teach? The quickstart over several seeds, and what GRPO adds to SFT.

    python benchmarks/learning.py --seeds 1 2 3 --out runs/learning

A seed whose ``evaluation.json`` is there already is not run again. Writes ``learning.json`` and prints, for each seed
and in the mean, Pass@1 at the training temperature with faults, and the differences that count: SFT over untrained,
GRPO over SFT, GRPO over SFT continued for the same time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path

from opensearch_lightning.quickstart import Quickstart, render_table

CELL = "sampled_faults"
DIFFERENCES = {
    "SFT - untrained": ("after SFT", "untrained"),
    "GRPO - SFT": ("after GRPO", "after SFT"),
    "GRPO - SFT continued": ("after GRPO", "SFT continued"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    results: dict[int, dict[str, float]] = {}
    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        table = folder / "evaluation.json"
        if not table.exists():
            shutil.rmtree(folder, ignore_errors=True)
            Quickstart(folder, seed=seed, overrides=args.overrides).run()
        rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
        print(f"\nseed {seed}\n{render_table(rows)}", flush=True)
        results[seed] = {row["name"]: 100 * row["cells"][CELL]["accuracy"] for row in rows if CELL in row["cells"]}
    (args.out / "learning.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nPass@1 at the training temperature with faults, points; seeds {args.seeds}")
    for name, (better, worse) in DIFFERENCES.items():
        gains = [result[better] - result[worse] for result in results.values()]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        print(f"{name:24s} {statistics.mean(gains):6.1f} ± {error:.1f}   each: {', '.join(f'{g:.1f}' for g in gains)}")


if __name__ == "__main__":
    main()
