"""Launching: resume, Ctrl-C, and every mistake a user can make as one clear line."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from opensearch_lightning import launch
from opensearch_lightning.composition import compose_config
from opensearch_lightning.errors import ConfigurationError
from tests.train_processes import CLOCKED, curves

ROOT = Path(__file__).parents[1]

TOY = {
    "experiment/toy.yaml": """
# @package _global_
defaults: [override /model: toy, override /module: toy, override /data: toy, override /callbacks: toy,
  override /logger: csv]
name: toy
trainer: {max_steps: 6, val_check_interval: 2}
""",
    "model/toy.yaml": """
policy: {_target_: tests.toy_run.ToyPolicy, size: 1}
processor: {_target_: tests.toy_run.ToyProcessor}
""",
    "data/toy.yaml": "_target_: tests.toy_run.ToyData\n",
    "module/toy.yaml": """
_target_: tests.toy_run.ToyModule
_shared_: {policy: policy}
log: ${run_dir}.log
interrupt: null
""",
    "callbacks/toy.yaml": """
defaults: [/callbacks/common@_here_]
""",
}


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """Arguments of a toy run under ``tmp_path``."""
    for name, text in TOY.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
    return ["--config-dir", str(tmp_path / "conf"), "experiment=toy", f"run_dir={tmp_path / 'run'}"]


def trained(tmp_path: Path, key: str = "train") -> list[int]:
    """Numbers that the toy run was trained (or validated) on, in order, over all its processes."""
    lines = (tmp_path / "run.log").read_text().splitlines()
    return [entry[key] for entry in map(json.loads, lines) if key in entry]


def weight(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["policy.weight"])


def stderr_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that stderr holds."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_run_trains_validates_keeps_checkpoints_and_exports(toy: list[str], tmp_path: Path) -> None:
    assert launch.main(toy) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert trained(tmp_path, "validation") == [0, 1, 2, 3] * 3
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert weight(run / "checkpoints" / "last.ckpt") == sum(range(6))
    assert float(torch.load(run / "policy" / "model.pt", weights_only=True)["weight"]) == sum(range(6))
    assert compose_config(["experiment=toy"], extra_dir=tmp_path / "conf")["module"]["interrupt"] is None
    assert "max_steps: 6" in (run / "config.yaml").read_text()
    assert not (run / ".hydra").exists()


def test_deepspeed_does_not_tell_that_there_is_no_gpu(toy: list[str]) -> None:
    assert launch.main([*toy, "trainer.max_steps=1"]) == 0
    logger = logging.getLogger("DeepSpeed")

    def passes(message: str) -> bool:
        return bool(logger.filter(logger.makeRecord("DeepSpeed", logging.WARNING, "f", 1, message, (), None)))

    assert not passes("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    assert passes("loss overflow")


def test_export_of_the_best_checkpoint(toy: list[str], tmp_path: Path) -> None:
    # The monitor is the weight itself, largest after the last validation, at update 4 of 5.
    assert launch.main([*toy, "trainer.max_steps=5", "export=best"]) == 0
    assert float(torch.load(tmp_path / "run" / "policy" / "model.pt", weights_only=True)["weight"]) == sum(range(4))


def test_resume_goes_on_where_the_checkpoint_stands(toy: list[str], tmp_path: Path) -> None:
    assert launch.main([*toy, "trainer.max_steps=4"]) == 0
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert launch.main([*toy, f"ckpt_path={last}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert weight(last) == sum(range(6))


def test_last_checkpoint_is_the_newest_state_though_the_best_is_older(toy: list[str], tmp_path: Path) -> None:
    # By this mode the first validation, after two updates, is the best one.
    overrides = ["callbacks.checkpoints.mode=min", "trainer.max_steps=5"]
    assert launch.main([*toy, *overrides]) == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    assert weight(checkpoints / "best.ckpt") == 0 + 1
    assert weight(checkpoints / "last.ckpt") == sum(range(5))
    assert launch.main([*toy, overrides[0], f"ckpt_path={checkpoints / 'last.ckpt'}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert weight(checkpoints / "best.ckpt") == 0 + 1
    assert weight(checkpoints / "last.ckpt") == sum(range(6))


def test_checkpoint_between_validations(toy: list[str], tmp_path: Path) -> None:
    overrides = ["callbacks.last_checkpoint.every_n_steps=3", "trainer.val_check_interval=100"]
    assert launch.main([*toy, *overrides, "module.interrupt={train: 4, times: 2}"]) == launch.INTERRUPTED
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert weight(last) == 0 + 1 + 2
    assert launch.main([*toy, *overrides, f"ckpt_path={last}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 3, 4, 5]


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert launch.main([*toy, "module.interrupt={train: 2}"]) == launch.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is handler
    assert trained(tmp_path) == [0, 1, 2]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert weight(last) == 0 + 1 + 2
    *_, hint = capsys.readouterr().err.strip().splitlines()
    assert hint.startswith(f"interrupted after 3 updates; saved {last}. Resume with: python train.py --config-dir")
    assert hint.endswith(f"ckpt_path={last}")
    steps = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in steps] == ["step", "0", "1", "2"]

    assert launch.main([*toy, f"ckpt_path={last}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert weight(last) == sum(range(6))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt"]


def test_ctrl_c_where_a_validation_is_due_skips_it(toy: list[str], tmp_path: Path) -> None:
    assert launch.main([*toy, "module.interrupt={train: 1}"]) == launch.INTERRUPTED
    assert trained(tmp_path) == [0, 1]
    assert trained(tmp_path, "validation") == []
    assert launch.main([*toy, f"ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_ctrl_c_in_a_validation_cuts_it(toy: list[str], tmp_path: Path) -> None:
    assert launch.main([*toy, "module.interrupt={validation: 2}"]) == launch.INTERRUPTED
    assert trained(tmp_path) == [0, 1]
    assert trained(tmp_path, "validation") == [0, 1, 2]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert weight(last) == 0 + 1
    assert launch.main([*toy, f"ckpt_path={last}"]) == 0
    assert trained(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_second_ctrl_c_stops_at_once(toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert launch.main([*toy, "module.interrupt={train: 3, times: 2}"]) == launch.INTERRUPTED
    signal.signal(signal.SIGINT, before)
    assert trained(tmp_path) == [0, 1, 2]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert weight(last) == 0 + 1
    assert f"ckpt_path={last}" in capsys.readouterr().err.strip().splitlines()[-1]


def test_train_py_as_a_process_obeys_a_real_ctrl_c(toy: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "train.py", *toy, "trainer.max_steps=1000000", "trainer.val_check_interval=1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run.log").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    done = len(trained(tmp_path))
    assert f"interrupted after {done} updates" in errors.splitlines()[-1]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["ToyData"] == {"first": done}


def test_a_finished_folder_is_not_overwritten(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*toy, "trainer.max_steps=2"]) == 0
    capsys.readouterr()
    assert launch.main(toy) == 2
    assert "holds a run already; go on with it by ckpt_path=" in stderr_line(capsys)
    assert trained(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=3", "there is no setting 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
        ("loger=csv", "there is no setting 'loger'; did you mean 'logger'?"),
        ("experiment=quickstart_sfd", "there is no experiment 'quickstart_sfd'; did you mean 'quickstart_sft'?"),
        ("garbage", "cannot read the setting 'garbage'"),
        ("seed=[1,", "cannot read the setting 'seed=[1,'"),
        ("run_dir=${nowhere}", "Interpolation key 'nowhere' not found"),
        ("name=???", "the setting 'name' has no value"),
        ("module=3", "module=3 is no choice of the group 'module': it takes a name, one of grpo, sft"),
        ("experiment=3", "experiment=3 is no choice of the group 'experiment'"),
        (
            "model=null",
            "model=null is no choice of the group 'model': it takes a name, one of qwen3_vl_30b_a3b, qwen3_vl_32b, "
            "qwen3_vl_8b, tiny",
        ),
        ("data=null", "data=null is no choice of the group 'data'"),
        ("seed=1,2", "seed=1,2 lists several values and one run takes one"),
        ("seed=abc", "seed is 'abc'; set a whole number from 0"),
        ("seed=-1", "seed is -1; set a whole number from 0"),
        ("seed=null", "seed is null; set a whole number from 0"),
        ("seed=4294967296", "seed is 4294967296; set a whole number from 0"),
        ("threads=0", "threads is 0; set a whole number of 1 or more, or null"),
        ("threads=abc", "threads is 'abc'; set"),
        ("run_dir=null", "run_dir is null; set the path of a folder"),
        ("run_dir=''", "run_dir is ''; set the path of a folder"),
        ("run_dir=/proc/none", "run_dir=/proc/none cannot be made (No such file or directory)"),
        ("data_dir=null", "data_dir is null; set the path of a folder"),
        ("ckpt_path=''", "ckpt_path is ''; set the path of a checkpoint"),
        ("ckpt_path=5", "ckpt_path is 5; set the path of a checkpoint"),
        ("ckpt_path=/", "ckpt_path=/ is a folder; SingleDeviceStrategy goes on from a file"),
        ("+data.num_workers=-1", "data.num_workers is -1; set 0 or more"),
        ("+data.val_tasks=0", "data.val_tasks is 0; set 1 or more"),
        ("+data.val_tasks=-1", "data.val_tasks is -1; set 1 or more"),
        ("logger.metrics_csv=3", "the setting 'logger.metrics_csv' is 3; it must be a mapping with _target_"),
        ("+module.lerning=3", "module: ToyModule got an unexpected keyword argument 'lerning'"),
        ("+trainer.devises=1", "did you mean 'devices'?"),
        ("module._target_=tests.toy_run.Nothing", "Are you sure that 'Nothing' is importable"),
        ("module._shared_.policy=polizy", "module needs the shared object 'polizy'"),
        ("module._shared_.policy=policy.wait", "module needs 'policy.wait' of the shared objects, but 'ToyPolicy'"),
        ("trainer.accelerator=abacus", "cannot build trainer: "),
        ("export=first", "export is 'first'; set one of last, best"),
        ("ckpt_path=nowhere.ckpt", "ckpt_path=nowhere.ckpt does not exist; no checkpoint lies there"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert launch.main([*toy, override]) == 2
    line = stderr_line(capsys)
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["", "/run"])
def test_run_dir_that_is_a_file(toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    assert launch.main([*toy, f"run_dir={file}{below}"]) == 2
    assert stderr_line(capsys) == (
        f"error: run_dir={file}{below} cannot be a folder: {file} is a file; choose another path"
    )
    assert file.read_text() == "kept"


def test_place_without_permission(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser may write everywhere, so the answer of the system is replaced.
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert launch.main(toy) == 2
    assert f"run_dir={tmp_path / 'run'} cannot be written: no permission in {tmp_path}" in stderr_line(capsys)


def test_disk_that_fills_up_is_one_line(
    toy: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/disk/config.yaml")

    monkeypatch.setattr(launch, "write_config", full)
    assert launch.main(toy) == 2
    assert stderr_line(capsys).startswith("error: cannot write /disk/config.yaml: No space left on device; make room")


def test_missing_config_dir(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--config-dir", "nowhere"]) == 2
    assert stderr_line(capsys) == "error: the config folder 'nowhere' does not exist"


@pytest.fixture
def finished(toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The last checkpoint of a finished toy run."""
    assert launch.main([*toy, "trainer.max_steps=2"]) == 0
    capsys.readouterr()
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def test_checkpoint_of_another_model(toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = finished.read_bytes()
    assert launch.main([*toy, "model.policy.size=2", f"ckpt_path={finished}"]) == 2
    assert "of another model: policy.weight is [1] there and [2] here" in stderr_line(capsys)
    assert finished.read_bytes() == before


@pytest.mark.parametrize("optimizer", ["AdamW", "two groups"])
def test_checkpoint_of_another_optimizer(
    toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    from tests.toy_run import ToyModule

    def configure(self: ToyModule) -> torch.optim.Optimizer:
        if optimizer == "AdamW":
            return torch.optim.AdamW(self.policy.parameters())
        more = {"params": [torch.nn.Parameter(torch.zeros(1))]}
        return torch.optim.SGD([{"params": list(self.policy.parameters())}, more], lr=1.0)

    monkeypatch.setattr(ToyModule, "configure_optimizers", configure)
    before = finished.read_bytes()
    assert launch.main([*toy, f"ckpt_path={finished}"]) == 2
    assert f"ckpt_path={finished} holds the state of another optimizer; set module.optimizer as" in stderr_line(capsys)
    assert finished.read_bytes() == before


def test_another_learning_rate_would_be_lost_on_a_resumed_run(
    toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.toy_run import ToyModule

    monkeypatch.setattr(
        ToyModule, "configure_optimizers", lambda self: torch.optim.SGD(self.policy.parameters(), lr=0.25)
    )
    assert launch.main([*toy, f"ckpt_path={finished}", "trainer.max_steps=3"]) == 2
    assert "goes on with its optimizer's learning rate 1, and 0.25 would do nothing" in stderr_line(capsys)


def test_optimizer_that_torch_refuses(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.toy_run import ToyModule

    monkeypatch.setattr(
        ToyModule, "configure_optimizers", lambda self: torch.optim.SGD(self.policy.parameters(), lr=-1.0)
    )
    assert launch.main(toy) == 2
    assert "cannot make the optimizer of module: Invalid learning rate: -1.0; see the settings under" in stderr_line(
        capsys
    )
    assert not (tmp_path / "run").exists()


def test_checkpoint_of_another_kind_of_training(
    toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.load(finished, weights_only=True)
    saved["OtherData"] = saved.pop("ToyData")
    torch.save(saved, finished)
    assert launch.main([*toy, f"ckpt_path={finished}"]) == 2
    assert "continues another kind of training (it holds no state of ToyData)" in stderr_line(capsys)


def test_unreadable_checkpoint(toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished.write_bytes(finished.read_bytes()[:100])
    assert launch.main([*toy, f"ckpt_path={finished}"]) == 2
    assert "is no checkpoint of this trainer" in stderr_line(capsys)


def test_wrong_checkpoint_name_lists_those_there(
    toy: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*toy, f"ckpt_path={finished.with_name('lats.ckpt')}"]) == 2
    assert f"there is: {finished.with_name('best.ckpt')}, {finished}" in stderr_line(capsys)


def test_print_shows_the_composed_configuration(toy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*toy, "--print", "trainer.max_steps=7"]) == 0
    assert "  max_steps: 7\n" in capsys.readouterr().out


def test_full_error_on_request(toy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="abacus") as caught:
        launch.main([*toy, "trainer.accelerator=abacus"])
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere", "no checkpoint at /nowhere"),
        ("data.shards=/nowhere", "/nowhere is no folder of shards"),
        ("data.max_length=100", "too_long"),
        ("data_dir=/nowhere data.shards=/nowhere/sft", "data_dir=/nowhere does not exist"),
        ("module.micro_batch=0", "micro_batch counts rows; got 0"),
        ("module.optimizer.lr=-1", "lr is -1; set a learning rate of 0 or more"),
        ("module.optimizer.lr=abc", "module.optimizer.lr is 'abc'; set a number"),
        ("module.optimizer.lr=null", "module.optimizer.lr is null; set a number"),
        ("data.batch_size=1.5", "data.batch_size is 1.5; set a whole number"),
        ("data.batch_size=0", "data.batch_size is 0; set 1 or more"),
        ("data.max_length=null", "data.max_length is null; set a whole number"),
        ("data.num_workers=-1", "data.num_workers is -1; set 0 or more"),
    ],
)
def test_files_and_values_that_cannot_work_are_one_line_and_write_nothing(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert launch.main([*sft_overrides(tiny, tmp_path / "run"), *override.split()]) == 2
    line = stderr_line(capsys)
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


def sft_overrides(tiny: dict[str, Path], run_dir: Path) -> list[str]:
    shards = [f"data.shards={tiny['sft']}", f"data.val_shards={tiny['sft']}"]
    small = ["data.batch_size=2", "data.max_length=4096", "trainer.max_steps=4", "trainer.val_check_interval=2"]
    return [f"model.path={tiny['model']}", f"run_dir={run_dir}", "logger=csv", *shards, *small]


def test_interrupted_and_resumed_sft_ends_with_the_weights_of_an_uninterrupted_one(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opensearch_lightning.modules import AgenticSFT

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch.main(sft_overrides(tiny, whole)) == 0

    step = AgenticSFT.training_step

    def interrupting_step(self: AgenticSFT, batch: object, batch_idx: int) -> None:
        step(self, batch, batch_idx)  # type: ignore[arg-type]
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(AgenticSFT, "training_step", interrupting_step)
        assert launch.main(sft_overrides(tiny, parted)) == launch.INTERRUPTED
    last = parted / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    assert launch.main([*sft_overrides(tiny, parted), f"ckpt_path={last}"]) == 0
    first, second = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, parted))
    assert first["state_dict"].keys() == second["state_dict"].keys()
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][name], value, rtol=0, atol=0)
    assert curves(whole, measured=CLOCKED) == curves(parted, measured=CLOCKED)


def test_grpo_run_on_failing_tools(tiny: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "grpo"
    small = ["data.prompts_per_step=2", "callbacks.rollout_generation.group_size=2", "data.val_tasks=2"]
    limits = ["callbacks.rollout_generation.max_turn_tokens=16", "rollout.engine.max_length=512"]
    assert (
        launch.main(
            [
                "experiment=quickstart_grpo",
                f"run_dir={run}",
                f"data_dir={tiny['root']}",
                f"model.path={tiny['model']}",
                f"data.shards={tiny['rl']}",
                f"data.val_shards={tiny['rl']}",
                "logger=csv",
                "trainer.max_steps=2",
                "trainer.val_check_interval=1",
                *small,
                *limits,
            ]
        )
        == 0
    )
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert {"train/reward", "train/turns", "val_sampled/accuracy", "val_greedy/turns"} <= set(header.split(","))
    assert len(rows) == 2
    assert (run / "policy" / "config.json").exists()
    assert list((run / "trajectories").glob("train-*.jsonl"))
