"""One training run from a composed configuration: build, check, fit, export."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from opensearch_lightning.composition import compose_config, make, to_yaml
from opensearch_lightning.errors import ConfigurationError, OpenSearchError

if TYPE_CHECKING:
    from lightning import LightningDataModule, LightningModule, Trainer

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""

EXPORTS = ("last", "best")

SHARED = {
    "processor": "model.processor",
    "policy": "model.policy",
    "engine": "rollout.engine",
    "executor": "tools.executor",
    "reward": "reward",
}
"""Objects that several nodes use, in the order in which they are built, and where the configuration describes them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one configuration describes, built and not yet started."""

    trainer: Trainer
    module: LightningModule
    datamodule: LightningDataModule
    shared: Mapping[str, Any]
    run_dir: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch train`` and ``train.py``."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in Hydra's grammar")
    parser.add_argument("--config-dir", help="a folder with configuration groups of your own")
    parser.add_argument("--print", action="store_true", dest="show", help="print the composed configuration and stop")


def run(args: argparse.Namespace, *, program: str = "opensearch train") -> int:
    """Carry out ``opensearch train``; returns the exit code.

    Raises:
        OpenSearchError: the configuration, a file or a checkpoint cannot be used; nothing was written.
    """
    config = compose_config(args.overrides, extra_dir=args.config_dir)
    if args.show:
        print(to_yaml(config), end="")
        return 0
    from opensearch_lightning.callbacks.graceful_interrupt import TrainingInterrupted

    try:
        run_dir = train(config)
    except TrainingInterrupted as interrupt:
        _say(f"{interrupt}.{_resume_hint(program, args, interrupt.checkpoint)}", sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        last = Path(config["run_dir"], "checkpoints", "last.ckpt")
        hint = _resume_hint(program, args, last if last.exists() else None)
        _say(f"stopped; what was not in a checkpoint is lost.{hint}", sys.stderr)
        return INTERRUPTED
    _say(f"done: {run_dir}", sys.stdout)
    return 0


def main(argv: Sequence[str] | None = None, *, program: str = "python train.py") -> int:
    """Entry of ``train.py``: like ``opensearch train``, errors as one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog=program, description="Compose conf/, instantiate, fit.")
    add_arguments(parser)
    try:
        return run(parser.parse_intermixed_args(argv), program=program)
    except OpenSearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def train(config: Mapping[str, Any]) -> Path:
    """Build the run that ``config`` describes, fit it, export its policy; returns the run's folder.

    Everything that can be checked is checked before anything is written.

    Raises:
        OpenSearchError: see the message.
        TrainingInterrupted: Ctrl-C, after a checkpoint was written.
        KeyboardInterrupt: a second Ctrl-C.
    """
    built = build(config)
    ckpt_path = config.get("ckpt_path")
    if ckpt_path is not None:
        check_checkpoint(Path(ckpt_path), built.module, built.datamodule)
    write_config(config, built.run_dir)
    _fit(built, ckpt_path)
    if config.get("export"):
        export_policy(built, config["export"])
    return built.run_dir


def build(config: Mapping[str, Any]) -> Run:
    """Instantiate every part, shared objects once, and open the data.

    Raises:
        OpenSearchError: a part cannot be built, a file cannot be used, or ``run_dir`` holds another run.
    """
    check_run_dir(Path(config["run_dir"]), config.get("ckpt_path"))
    if config.get("export") not in (None, *EXPORTS):
        raise ConfigurationError(f"export is {config['export']!r}; set one of {', '.join(EXPORTS)}, or null for none")
    try:
        built = _build(config)
        # The Trainer will do this again, to no effect; here a missing file is found while nothing is written.
        built.datamodule.setup("fit")
        return built
    except OpenSearchError as error:
        data_dir = Path(config["data_dir"])
        if data_dir.exists():
            raise
        raise ConfigurationError(
            f"{error}. data_dir={data_dir} does not exist: `make quickstart` lays the default one, or set your own"
        ) from error


def _build(config: Mapping[str, Any]) -> Run:
    shared = build_shared(config)
    datamodule = make("data", config["data"], shared)
    module = make("module", config["module"], shared)
    callbacks = _make_all("callbacks", config.get("callbacks"), shared)
    loggers = _make_all("logger", config.get("logger"), shared)
    # Lightning takes False, not an empty list, as "no logger".
    parts = shared | {"callbacks": callbacks, "loggers": loggers or False}
    trainer = make("trainer", config["trainer"], parts)
    return Run(trainer=trainer, module=module, datamodule=datamodule, shared=shared, run_dir=Path(config["run_dir"]))


def build_shared(config: Mapping[str, Any], *, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The objects that several parts use, by the names of :data:`SHARED`, after seeding.

    Args:
        config: a composed configuration.
        given: objects to take in place of those that the configuration describes.

    Raises:
        ConfigurationError: one cannot be built.
    """
    _quiet()
    import lightning
    import torch

    if config.get("threads") is not None:
        torch.set_num_threads(int(config["threads"]))
    lightning.seed_everything(config["seed"], workers=True, verbose=False)
    shared: dict[str, Any] = dict(given or {})
    for name, place in SHARED.items():
        node = _at(config, place)
        if node is not None and name not in shared:
            shared[name] = make(place, node, shared)
    return shared


def _at(config: Mapping[str, Any], place: str) -> Any:
    node: Any = config
    for key in place.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _make_all(group: str, nodes: Mapping[str, Any] | None, shared: Mapping[str, Any]) -> list[Any]:
    """The members of a group in the order of the configuration; ``null`` turns one off."""
    return [make(f"{group}.{name}", node, shared) for name, node in (nodes or {}).items() if node is not None]


def check_run_dir(run_dir: Path, ckpt_path: str | None) -> None:
    """Refuse to mix two runs in one folder.

    Raises:
        ConfigurationError: ``run_dir`` holds checkpoints and ``ckpt_path`` is none of them.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        return
    if ckpt_path is None or checkpoints.resolve() not in Path(ckpt_path).resolve().parents:
        raise ConfigurationError(
            f"{run_dir} holds a run already; go on with it by ckpt_path={checkpoints / 'last.ckpt'}, "
            f"choose another run_dir=…, or remove the folder"
        )


def check_checkpoint(path: Path, module: LightningModule, datamodule: LightningDataModule) -> None:
    """See that ``path`` continues this very training: same kind, same parameters.

    A folder (the checkpoint of a sharded strategy) is left to the strategy.

    Raises:
        ConfigurationError: the file is missing, unreadable, or of another model or kind of training.
    """
    if not path.exists():
        near = sorted(str(file) for file in path.parent.glob("*.ckpt"))
        raise ConfigurationError(
            f"ckpt_path={path} does not exist; {'there is: ' + ', '.join(near) if near else 'no checkpoint lies there'}"
        )
    if path.is_dir():
        return
    import torch

    try:
        saved = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        weights = saved["state_dict"]
    except Exception as error:
        raise ConfigurationError(
            f"ckpt_path={path} is no checkpoint of this trainer ({type(error).__name__})"
        ) from error
    kind = type(datamodule).__qualname__
    if kind not in saved:
        raise ConfigurationError(
            f"ckpt_path={path} continues another kind of training (it holds no state of {kind}); to start from the "
            "weights of a finished run set model.path to its folder policy/"
        )
    own = module.state_dict()
    difference = _first_difference(weights, own)
    if difference:
        raise ConfigurationError(
            f"ckpt_path={path} is a checkpoint of another model: {difference}; set model.path (and its options) as in "
            f"that run, see config.yaml beside its checkpoints"
        )


def _first_difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    for name, weight in own.items():
        if name not in saved:
            return f"it has no {name}"
        if saved[name].shape != weight.shape:
            return f"{name} is {list(saved[name].shape)} there and {list(weight.shape)} here"
    extra = [name for name in saved if name not in own]
    return f"it has {extra[0]}, which this model has not" if extra else None


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Keep the composed configuration as ``config.yaml`` in the run's folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def _fit(built: Run, ckpt_path: str | None) -> None:
    from lightning.pytorch.trainer.states import TrainerStatus

    try:
        built.trainer.fit(built.module, datamodule=built.datamodule, ckpt_path=ckpt_path)
    except SystemExit:
        # Lightning exits when it met a KeyboardInterrupt; the caller says how to go on.
        if built.trainer.state.status == TrainerStatus.INTERRUPTED:
            raise KeyboardInterrupt from None
        raise


def export_policy(built: Run, which: str) -> Path | None:
    """Write the policy with its processor as ``<run>/policy``, a folder that ``model.path`` takes.

    Args:
        built: the run, fitted.
        which: ``"last"``, or ``"best"`` by the checkpoint callback's monitor (the last when it kept none).

    Returns:
        The folder; ``None`` where the strategy shards the weights: convert its checkpoint instead.
    """
    import torch

    trainer, target = built.trainer, built.run_dir / "policy"
    if type(trainer.strategy).__name__ in ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"):
        return None
    if not trainer.is_global_zero:
        return target
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if which == "best" and best:
        built.module.load_state_dict(torch.load(best, map_location="cpu", weights_only=True)["state_dict"])
    scratch = target.with_name("policy.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    built.shared["policy"].save_pretrained(scratch)
    built.shared["processor"].save_pretrained(scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return target


def _say(text: str, file: TextIO) -> None:
    """Once, however many ranks there are."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    rank_zero_only(print)(text, file=file)


def _resume_hint(program: str, args: argparse.Namespace, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return ""
    kept = [override for override in args.overrides if not override.startswith("ckpt_path=")]
    config_dir = [f"--config-dir={args.config_dir}"] if args.config_dir else []
    return f" Resume with: {program} {shlex.join([*config_dir, *kept, f'ckpt_path={checkpoint}'])}"


def _quiet() -> None:
    """Only what went wrong: Lightning's and transformers' remarks would drown the line of progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*isinstance.treespec, LeafSpec.*",
        ".*does not have many workers.*",
        "Checkpoint directory .* exists and is not empty",
        ".*dataloader is not resumable.*",
        "Total length of `list` across ranks is zero.*",
        # Policies have no dropout; engine and trainer share one, which is in evaluation mode.
        "Found .* in eval mode at the start of training.*",
        "You have overridden `transfer_batch_to_device`.*",
    ):
        warnings.filterwarnings("ignore", message=message)
