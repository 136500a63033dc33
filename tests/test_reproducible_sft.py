"""Fine-tuning through ``train.py`` on a tiny world: a kill −9 and a resume leave no trace in curves and order."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from opensearch_lightning.chat import SFTBatch
from tests.train_processes import CLOCKED, curves, finish, start

STEPS = 14


class KeepRows(L.Callback):
    """Writes the tokens of each row that was trained, by step; what a resumed run trains again takes its place."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: SFTBatch, index: int) -> None:
        self.folder.mkdir(exist_ok=True)
        rows = [ids[valid].tolist() for one in batch.passes for ids, valid in zip(_ids(one), one.valid, strict=True)]
        (self.folder / f"{trainer.global_step}.json").write_text(json.dumps(rows))


def _ids(one: Any) -> Any:
    index_BT = getattr(one, "index_BT", None)
    return one.input_ids if index_BT is None else one.input_ids[0][index_BT]


def settings_of(tiny: dict[str, Path], run: Path, packing: str, *more: str) -> list[str]:
    return [
        "experiment=quickstart_sft",
        f"run_dir={run}",
        f"model.path={tiny['model']}",
        f"data.shards={tiny['sft']}",
        f"data.val_shards={tiny['sft']}",
        f"data.packing={packing}",
        "data.max_length=2048",
        "data.num_workers=2",
        f"data.batch_size={1 if packing == 'tokens' else 3}",
        "module.optimizer.lr=1e-3",
        "callbacks.last_checkpoint.every_n_steps=3",
        "+callbacks.keep_rows._target_=tests.test_reproducible_sft.KeepRows",
        f"+callbacks.keep_rows.folder={run}/rows",
        f"trainer.max_steps={STEPS}",
        "trainer.val_check_interval=5",
        "logger=csv",
        "export=null",
        *more,
    ]


def rows_of(run: Path) -> list[list[list[int]]]:
    return [json.loads((run / "rows" / f"{step}.json").read_text()) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("packing", ["off", "tokens"])
def test_kill_and_resume_gives_the_curves_of_an_undisturbed_run(
    tiny: dict[str, Path], tmp_path: Path, packing: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(settings_of(tiny, whole, packing)))
    assert len({json.dumps(row) for step in rows_of(whole) for row in step}) == 12, "an epoch is not over"
    assert len({row["train/loss"] for row in curves(whole, measured=CLOCKED)}) > STEPS - 2

    process = start(settings_of(tiny, killed, packing))
    last, deadline = killed / "checkpoints" / "last.ckpt", time.monotonic() + 300
    # killed behind a step that no checkpoint holds yet, in the second epoch
    while not (killed / "rows" / "8.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert last.exists()
    (killed / "rows" / "8.json").unlink()
    finish(start(settings_of(tiny, killed, packing, f"ckpt_path={last}")))
    assert curves(killed, measured=CLOCKED) == curves(whole, measured=CLOCKED)
    assert rows_of(killed) == rows_of(whole)
