"""One training run from a composed configuration: build, check, fit, export."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import logging
import shlex
import sys
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from opensearch_lightning.composition import compose_config, groups, make, to_yaml
from opensearch_lightning.errors import ConfigurationError, OpenSearchError, one_line
from opensearch_lightning.paths import check_folder

if TYPE_CHECKING:
    from lightning import LightningDataModule, LightningModule, Trainer
    from torch import Tensor

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""

EXPORTS = ("last", "best")

SHARDED_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy")
"""Strategies, besides DeepSpeed's, whose checkpoints may be folders and whose weights lie in no one place."""

UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
)
"""Why the system would not write: permission, a full or read-only disk, something in the way."""

MAX_SEED = 2**32 - 1

LEAST = {
    "data.batch_size": 1,
    "data.max_length": 1,
    "data.prompts_per_step": 1,
    "data.val_tasks": 1,
    "data.num_workers": 0,
}
"""Settings that count something, and the smallest count that works."""

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
    optimizer_states: Sequence[Mapping[str, Any]] = ()
    """State of each fresh optimizer; the optimizers themselves would hold on to weights that a strategy shards."""


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
        check_checkpoint_form(Path(ckpt_path), built.trainer)
        check_checkpoint(Path(ckpt_path), built.module, built.datamodule, built.optimizer_states)
    with _writing():
        write_config(config, built.run_dir)
        _fit(built, ckpt_path)
        if config.get("export"):
            export_policy(built, config["export"])
    return built.run_dir


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turns a place that cannot be written into one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is None:
            raise
        raise ConfigurationError(
            f"cannot write {error.filename}: {error.strerror}; make room or give permission there, or set another "
            "run_dir"
        ) from error


def check_settings(config: Mapping[str, Any]) -> None:
    """The settings that stand alone, all before anything is built.

    Raises:
        ConfigurationError: one of them cannot work; the message names it, its value, and what to set.
    """
    seed: Any = config.get("seed")
    threads, ckpt_path = config.get("threads"), config.get("ckpt_path")
    if not _is_count(seed, 0) or seed > MAX_SEED:
        raise ConfigurationError(f"seed is {_shown(seed)}; set a whole number from 0 to {MAX_SEED}")
    if threads is not None and not _is_count(threads, 1):
        raise ConfigurationError(f"threads is {_shown(threads)}; set a whole number of 1 or more, or null")
    for name in ("run_dir", "data_dir"):
        if not _is_path(config.get(name)):
            raise ConfigurationError(f"{name} is {_shown(config.get(name))}; set the path of a folder, as ./runs/mine")
    if ckpt_path is not None and not _is_path(ckpt_path):
        raise ConfigurationError(
            f"ckpt_path is {_shown(ckpt_path)}; set the path of a checkpoint, as runs/mine/checkpoints/last.ckpt, or "
            "null to begin anew"
        )
    if config.get("export") not in (None, *EXPORTS):
        raise ConfigurationError(f"export is {config['export']!r}; set one of {', '.join(EXPORTS)}, or null for none")
    for name, least in LEAST.items():
        value = _at(config, name)
        if isinstance(value, int) and value < least:
            raise ConfigurationError(f"{name} is {value}; set {least} or more")
    if _at(config, "tools.executor.tools") == []:
        raise ConfigurationError(
            "tools.executor.tools is [], an empty tool list; leave it out for those of the tools group, name at least "
            "one, or take tools=switched_off for a policy without its tools"
        )


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and str(value).strip() != ""


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def build(config: Mapping[str, Any]) -> Run:
    """Instantiate every part, shared objects once, and open the data.

    Raises:
        OpenSearchError: a part cannot be built, a file cannot be used, or ``run_dir`` holds another run.
    """
    check_settings(config)
    check_run_dir(Path(config["run_dir"]), config.get("ckpt_path"))
    try:
        built = _build(config)
        # The Trainer will do this again, to no effect; here a missing file is found while nothing is written.
        built.datamodule.setup("fit")
        return built
    except OpenSearchError as error:
        data_dir = Path(config["data_dir"])
        if data_dir.exists() or str(data_dir) not in str(error):
            raise
        raise ConfigurationError(
            f"{error}. data_dir={data_dir} does not exist: `make quickstart` lays the default one, or set your own"
        ) from error


def _build(config: Mapping[str, Any]) -> Run:
    shared = build_shared(config)
    datamodule = make("data", _required(config, "data"), shared)
    module = make("module", _required(config, "module"), shared)
    callbacks = _make_all("callbacks", config.get("callbacks"), shared)
    loggers = _make_all("logger", config.get("logger"), shared)
    # Lightning takes False, not an empty list, as "no logger".
    parts = shared | {"callbacks": callbacks, "loggers": loggers or False}
    trainer = make("trainer", _required(config, "trainer"), parts)
    return Run(
        trainer=trainer,
        module=module,
        datamodule=datamodule,
        shared=shared,
        run_dir=Path(config["run_dir"]),
        optimizer_states=_optimizer_states(trainer, module),
    )


def _required(config: Mapping[str, Any], group: str) -> Any:
    node = config.get(group)
    if node is None:
        raise ConfigurationError(
            f"{group} is null, and a run needs one; set {group}= one of {', '.join(groups()[group])}"
        )
    return node


def _optimizer_states(trainer: Trainer, module: LightningModule) -> list[Mapping[str, Any]]:
    """States of the optimizers that the fit will make, made once for what is wrong with their settings.

    None where the end of training is not known before the fit, or the module needs a running one.

    Raises:
        ConfigurationError: their settings cannot work.
    """
    from lightning.pytorch.core.optimizer import _configure_optimizers
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    if trainer.max_steps < 0:
        return []
    module.trainer = trainer
    try:
        made: Any = module.configure_optimizers()
        return [] if made is None else [optimizer.state_dict() for optimizer in _configure_optimizers(made)[0]]
    except OpenSearchError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot make the optimizer of module: {one_line(error)}; see the settings under module.optimizer"
        ) from error
    except (AttributeError, RuntimeError, MisconfigurationException) as error:
        # a module may ask for what only a running fit has; the fit then makes the optimizer, and raises what is wrong
        logging.getLogger(__name__).debug("the optimizer is not checked before the fit: %s", error)
        return []
    finally:
        module.trainer = None


def build_shared(config: Mapping[str, Any], *, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The objects that several parts use, by the names of :data:`SHARED`, after seeding.

    Args:
        config: a composed configuration.
        given: objects to take in place of those that the configuration describes.

    Raises:
        ConfigurationError: one cannot be built.
    """
    check_settings(config)
    _quiet()
    import lightning
    import torch

    if config.get("threads") is not None:
        torch.set_num_threads(config["threads"])
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
    """Refuse a folder that cannot be written, and to mix two runs in one.

    Raises:
        ConfigurationError: ``run_dir`` is no folder, or holds checkpoints and ``ckpt_path`` is none of them.
    """
    check_folder("run_dir", run_dir)
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        return
    if ckpt_path is None or checkpoints.resolve() not in Path(ckpt_path).resolve().parents:
        raise ConfigurationError(
            f"{run_dir} holds a run already; go on with it by ckpt_path={checkpoints / 'last.ckpt'}, "
            f"choose another run_dir=…, or remove the folder"
        )


def check_checkpoint_form(path: Path, trainer: Trainer) -> None:
    """See that the strategy can read ``path``: a file, or a folder of this stage and number of ranks.

    Raises:
        ConfigurationError: it can not; a path that does not exist is left to :func:`check_checkpoint`.
    """
    from opensearch_lightning.strategies import check_continues, is_deepspeed, zero_stage

    strategy: Any = trainer.strategy
    name = type(strategy).__name__
    if not path.exists():
        return
    if is_deepspeed(strategy):
        if path.is_file() and not (strategy.load_full_weights and strategy.zero_stage_3):
            raise ConfigurationError(
                f"ckpt_path={path} is a file, of one process or DDP; {name} goes on from a folder that it wrote. To "
                "start from the weights of that run set model.path to its folder policy/"
            )
        if path.is_dir():
            check_continues(path, stage=zero_stage(strategy), world_size=trainer.num_nodes * trainer.num_devices)
    elif path.is_dir() and name not in SHARDED_STRATEGIES:
        raise ConfigurationError(
            f"ckpt_path={path} is a folder; {name} goes on from a file, such as <run>/checkpoints/last.ckpt. To start "
            f"from the weights of a run under DeepSpeed: opensearch export {path} <folder> --model <model.path>, then "
            "model.path=<folder>"
        )


def check_checkpoint(
    path: Path,
    module: LightningModule,
    datamodule: LightningDataModule,
    optimizer_states: Sequence[Mapping[str, Any]] = (),
) -> None:
    """See that ``path`` continues this very training: same kind, same parameters, same optimizer.

    Of a folder (the checkpoint of a sharded strategy) the optimizer is left to the strategy; without
    ``optimizer_states``, those of fresh optimizers, it is not compared either.

    Raises:
        ConfigurationError: the file is missing, unreadable, or of another model, optimizer or kind of training.
    """
    if not path.exists():
        near = sorted(str(file) for file in path.parent.glob("*.ckpt"))
        raise ConfigurationError(
            f"ckpt_path={path} does not exist; {'there is: ' + ', '.join(near) if near else 'no checkpoint lies there'}"
        )
    if path.is_dir():
        _check_folder_checkpoint(path, module, datamodule)
        return
    import torch

    try:
        saved = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        weights = saved["state_dict"]
    except Exception as error:
        raise ConfigurationError(
            f"ckpt_path={path} is no checkpoint of this trainer ({type(error).__name__})"
        ) from error
    _check_kind(path, datamodule, saved)
    own = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    _check_same_model(path, {name: tuple(weight.shape) for name, weight in weights.items()}, own)
    if optimizer_states and not _same_optimizers(saved.get("optimizer_states", []), optimizer_states):
        raise ConfigurationError(
            f"ckpt_path={path} holds the state of another optimizer; set module.optimizer as in that run, see "
            "config.yaml beside its checkpoints, or start from its weights: model.path=<run>/policy"
        )
    changed = _first_changed_rate(saved.get("optimizer_states", []), optimizer_states) if optimizer_states else None
    if changed is not None:
        raise ConfigurationError(
            f"ckpt_path={path} goes on with its optimizer's learning rate {changed[0]:g}, and {changed[1]:g} would do "
            "nothing; set that of module.optimizer as in that run, or start from its weights: model.path=<run>/policy"
        )


def _check_folder_checkpoint(path: Path, module: LightningModule, datamodule: LightningDataModule) -> None:
    from opensearch_lightning.strategies import read_layout, saved_names

    if not (path / "latest").is_file():
        return
    kinds, shapes = saved_names(read_layout(path))
    _check_kind(path, datamodule, kinds)
    own = {name: tuple(weight.shape) for name, weight in module.named_parameters() if weight.requires_grad}
    _check_same_model(path, shapes, own)


def _check_kind(path: Path, datamodule: LightningDataModule, saved: Container[str]) -> None:
    kind = type(datamodule).__qualname__
    if kind not in saved:
        raise ConfigurationError(
            f"ckpt_path={path} continues another kind of training (it holds no state of {kind}); to start from the "
            "weights of a finished run set model.path to its folder policy/"
        )


def _check_same_model(path: Path, saved: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]]) -> None:
    difference = _first_difference(saved, own)
    if difference:
        raise ConfigurationError(
            f"ckpt_path={path} is a checkpoint of another model: {difference}; set model.path (and its options) as in "
            f"that run, see config.yaml beside its checkpoints"
        )


def _same_optimizers(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> bool:
    there = [state["param_groups"] for state in saved]
    here = [state["param_groups"] for state in own]
    if [_sizes(groups) for groups in there] != [_sizes(groups) for groups in here]:
        return False
    pairs = zip(itertools.chain(*there), itertools.chain(*here), strict=True)
    # A release of torch may add or drop a setting; another optimizer has settings of its own on both sides.
    return not any(set(old) - set(new) - {"initial_lr"} and set(new) - set(old) - {"initial_lr"} for old, new in pairs)


def _first_changed_rate(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> tuple[float, float] | None:
    """Learning rates there and here, before any schedule, of the first group of parameters where they differ."""
    groups = zip(*(itertools.chain(*(s["param_groups"] for s in states)) for states in (saved, own)), strict=True)
    rates = (tuple(float(group.get("initial_lr", group["lr"])) for group in pair) for pair in groups)
    return next(((there, here) for there, here in rates if there != here), None)


def _sizes(param_groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in param_groups]


def _first_difference(saved: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]]) -> str | None:
    for name, shape in own.items():
        if name not in saved:
            return f"it has no {name}"
        if saved[name] != shape:
            return f"{name} is {list(saved[name])} there and {list(shape)} here"
    extra = [name for name in saved if name not in own]
    return f"it has {extra[0]}, which this model has not" if extra else None


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Keep the composed configuration as ``config.yaml`` in the run's folder."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"run_dir={run_dir} cannot be made ({error.strerror}); choose another path") from error
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
        The folder; ``None`` under a sharding strategy that is not DeepSpeed's.
    """
    import torch

    from opensearch_lightning.export import save_whole
    from opensearch_lightning.models import full_weights, has_adapters
    from opensearch_lightning.strategies import is_deepspeed

    trainer, target = built.trainer, built.run_dir / "policy"
    best = getattr(trainer.checkpoint_callback, "best_model_path", "") if which == "best" else ""
    if is_deepspeed(trainer.strategy):
        _export_from_ranks(built, target, best)
        return target
    if type(trainer.strategy).__name__ in SHARDED_STRATEGIES:
        return None
    if not trainer.is_global_zero:
        return target
    if best:
        built.module.load_state_dict(torch.load(best, map_location="cpu", weights_only=True)["state_dict"])
    if has_adapters(built.shared["policy"]):
        _write_weights(built, target, dict(full_weights(built.shared["policy"])))
    else:
        save_whole(built.shared["policy"], built.shared["processor"], target)
    return target


def _write_weights(built: Run, target: Path, weights: Mapping[str, Tensor]) -> None:
    from opensearch_lightning.export import write_policy
    from opensearch_lightning.models import adapter_alpha

    policy = built.shared["policy"]
    write_policy(
        weights,
        target,
        config=policy.config,
        generation_config=policy.generation_config,
        processor=built.shared["processor"],
        lora_alpha=adapter_alpha(policy),
    )


def _export_from_ranks(built: Run, target: Path, best: str) -> None:
    """Every rank gives its part; the first puts them together and writes."""
    from opensearch_lightning.export import in_dtype
    from opensearch_lightning.models import full_weights
    from opensearch_lightning.strategies import consolidated_weights

    policy, first = built.shared["policy"], built.trainer.is_global_zero
    weights = {}
    if best and first:
        weights = in_dtype(consolidated_weights(best), policy.dtype)
    elif not best:
        for name, weight in full_weights(policy):
            if first:
                weights |= in_dtype([(name, weight)], policy.dtype)
    if first:
        _write_weights(built, target, weights)
    built.trainer.strategy.barrier()


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


def _tells_more_than_the_accelerator(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


def _quiet() -> None:
    """Only what went wrong: Lightning's and transformers' remarks would drown the line of progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers imports DeepSpeed, where it is installed, to save a model
    logging.getLogger("DeepSpeed").addFilter(_tells_more_than_the_accelerator)
    for message in (
        ".*isinstance.treespec, LeafSpec.*",
        ".*does not have many workers.*",
        "Checkpoint directory .* exists and is not empty",
        ".*dataloader is not resumable.*",
        "Total length of `list` across ranks is zero.*",
        # Modules sum over ranks themselves.
        "It is recommended to use .self.log.*sync_dist=True.*",
        # Policies have no dropout; engine and trainer share one, which is in evaluation mode.
        "Found .* in eval mode at the start of training.*",
        "You have overridden `transfer_batch_to_device`.*",
    ):
        warnings.filterwarnings("ignore", message=message)
