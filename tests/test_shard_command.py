"""The commands ``opensearch shard`` and ``opensearch measure`` as their users meet them."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from opensearch_lightning.cli import main
from opensearch_lightning.data import ShardKind, ShardReader
from opensearch_lightning.data.lengths import lengths_file
from opensearch_lightning.data.samples import SampleSource
from tests.data.corpora import digests, rl_source, sft_source
from tests.models.tiny import tiny_checkpoint, tiny_processor

ROOT = Path(__file__).parents[1]


def started(*arguments: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "opensearch_lightning.cli", "shard", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell starts in the background ignores SIGINT, and so would all that it starts
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def finished_blocks(out: Path) -> Sequence[Path]:
    return list((out.with_name(f".{out.name}.partial") / "blocks").glob("*.json"))


@pytest.fixture(scope="module")
def slow_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that take a while each: their pictures are large."""
    return sft_source(tmp_path_factory.mktemp("slow") / "web", 90, side=500)


def test_killed_or_stopped_and_run_again_it_makes_the_same(
    slow_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rows-per-block", 3]
    assert main([*map(str, ["shard", slow_corpus, tmp_path / "whole", *options, "--workers", 0])]) == 0
    out = tmp_path / "s"
    killed = started(slow_corpus, out, *options, "--workers", 2)
    until(lambda: len(finished_blocks(out)) >= 2)
    workers = descendants(killed)
    killed.kill()
    killed.communicate()
    assert len(finished_blocks(out)) < 30, "it was killed too late to tell anything"
    assert not out.exists()
    # whoever is left would go on writing
    assert psutil.wait_procs(workers, timeout=60)[1] == []

    before = len(finished_blocks(out))
    stopped = started(slow_corpus, out, *options, "--workers", 1)
    until(lambda: len(finished_blocks(out)) > before)
    os.kill(stopped.pid, signal.SIGINT)
    _, errors = stopped.communicate(timeout=120)
    assert stopped.returncode == 130
    kept = 3 * len(finished_blocks(out))
    assert f"{kept} rows are done and kept; run the same command again to go on" in errors
    assert f"{3 * before} rows are there already from an earlier run" in errors
    assert not out.exists()

    capsys.readouterr()
    assert main([*map(str, ["shard", slow_corpus, out, *options, "--workers", 0])]) == 0
    shown = capsys.readouterr()
    assert f"{kept} rows are there already from an earlier run" in shown.err
    assert "0 of 90 rows dropped" in shown.out
    assert "done: 90 rows" in shown.out
    assert digests(out) == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "whole"]


def test_it_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = sft_source(tmp_path / "web", 9)
    command = ["shard", str(corpus), str(tmp_path / "s"), "--workers", "0", "--processor", str(tiny_checkpoint())]
    assert main(command) == 0
    assert main(command) == 0
    assert "s is up to date: made from the same records with the same settings" in capsys.readouterr().out
    assert main([*command, "--chunk-mb", "1"]) == 2
    assert "settings chunk_bytes: 67108864, now 1048576" in capsys.readouterr().err
    assert main([*command, "--chunk-mb", "1", "--fresh"]) == 0
    meta = json.loads((tmp_path / "s" / "shards.json").read_text())
    assert (meta["rows"], meta["sources"]) == (9, [["web", 9]])


def test_kinds_are_told_by_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"question": "Which town?", "answer": "Lyon", "images": ["a.png"]}
    asked = {"messages": [{"role": "user", "content": "Which town?"}], "answer": "Lyon", "images": ["b.png"]}
    rl = rl_source(tmp_path / "rl", [task, asked])
    sft = sft_source(tmp_path / "sft", 3)
    assert main(["shard", str(rl), str(tmp_path / "r"), "--workers", "0"]) == 0
    assert main(["shard", str(sft), str(tmp_path / "t"), "--workers", "0"]) == 0
    assert len(ShardReader(tmp_path / "r", kind=ShardKind.RL)) == 2
    assert len(ShardReader(tmp_path / "t", kind=ShardKind.SFT)) == 3
    assert main(["shard", str(rl), str(sft), str(tmp_path / "b"), "--workers", "0"]) == 2
    assert "rows of two kinds (rl: rl, sft: sft)" in capsys.readouterr().err
    assert main(["shard", str(sft), f"{sft}/../sft", str(tmp_path / "b")]) == 2
    assert "is named twice; name each source once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none.jsonl", "{}/s"], "none.jsonl does not exist"),
        (["{}/s"], "name one source or more"),
        (["{}/web", "{}/file/s"], "cannot be a folder"),
        (["{}/web", "{}/s", "--processor", "{}/none"], "no checkpoint at"),
        (["{}/empty.jsonl", "{}/s"], "empty holds no record"),
        (["{}/list.jsonl", "{}/s"], "list.jsonl[0] is a list, not an object"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    sft_source(tmp_path / "web", 1)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    assert main(["shard", *(argument.format(tmp_path) for argument in arguments), "--workers", "0"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_lengths_are_added_to_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "s"
    assert main(["shard", str(sft_source(tmp_path / "web", 9)), str(shards), "--workers", "0"]) == 0
    before = digests(shards)
    measure = ["measure", str(shards), "--processor", str(tiny_checkpoint()), "--no-tools"]
    assert main(measure) == 0
    source = SampleSource(ShardReader(shards, kind=ShardKind.SFT), tiny_processor(), render_tools=False)
    kept = lengths_file(shards, source)
    lengths = json.loads(kept.read_text())
    assert lengths == [len(source.sample(i).token_ids) for i in range(9)]
    assert (
        f"9 rows, the longest of {max(lengths)} tokens; 0 cannot be rendered\ndone: {kept}" in capsys.readouterr().out
    )
    assert main(measure) == 0
    assert f"{kept} was there already" in capsys.readouterr().out
    after = digests(shards)
    assert after.keys() - before.keys() == {kept.name}
    assert before.items() <= after.items()


PEAKS = """
import json, sys
import litdata.streaming.writer
from opensearch_lightning.cli import main

import opensearch_lightning.data.sharding.cli

def held(what):
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith(what))

if __name__ == "__main__":
    imported = held("VmRSS")
    assert main(["shard", *sys.argv[1:]]) == 0
    print(json.dumps(held("VmHWM") - imported))
"""


def parquet(path: Path, n_rows: int) -> Path:
    """Rows that hold one of 250 images of 100 KB each."""
    rng, files = np.random.default_rng(0), []
    for _ in range(250):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (183, 183, 3), dtype=np.uint8)).save(buffer, format="PNG")
        files.append(buffer.getvalue())
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("conversations", pa.list_(turn)), ("images", pa.list_(image))])
    turns = [{"from": "human", "value": "<image>Where?"}, {"from": "gpt", "value": "There. " * 500}]
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, n_rows, 125):
            images = [[{"bytes": files[i % 250], "path": None}] for i in range(start, start + 125)]
            writer.write_table(pa.Table.from_pylist([{"conversations": turns, "images": i} for i in images], schema))
    return path


def peaks(tmp_path: Path, n_rows: int) -> tuple[int, int]:
    """MB above the imports that the command's own process holds at most, and the one of its worker."""
    program = tmp_path / "program.py"
    program.write_text(PEAKS)
    source, out = parquet(tmp_path / f"{n_rows}.parquet", n_rows), tmp_path / f"{n_rows}"
    command = [sys.executable, str(program), str(source), str(out), "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    first: dict[int, int] = {}
    most: dict[int, int] = {}

    def watch() -> None:
        while process.poll() is None:
            for pid in _grandchildren(process.pid):
                held = _held(pid)
                if held is not None:
                    # forked from the process that imported everything
                    first.setdefault(pid, held[0])
                    most[pid] = max(most.get(pid, 0), held[1])
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate(timeout=400)
    watcher.join()
    assert process.returncode == 0
    assert len(ShardReader(out, kind=ShardKind.SFT)) == n_rows
    (worker,) = most
    return json.loads(output.splitlines()[-1]), most[worker] - first[worker]


def _grandchildren(pid: int) -> list[int]:
    try:
        children = psutil.Process(pid).children()
        return [inner.pid for child in children for inner in child.children()]
    except psutil.NoSuchProcess:
        return []


def _held(pid: int) -> tuple[int, int] | None:
    """MB resident now and at most."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return (int(values["VmRSS"]) // 1024, int(values["VmHWM"]) // 1024) if len(values) == 2 else None


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    small, large = peaks(tmp_path, 1000), peaks(tmp_path, 3000)
    assert max(*small, *large) < 300, (small, large)
    assert large[0] - small[0] < 50, (small, large)
    assert large[1] - small[1] < 50, (small, large)
