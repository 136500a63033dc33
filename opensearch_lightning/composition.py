"""From Hydra's groups to plain containers and objects: nothing below this module sees a DictConfig."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from opensearch_lightning import conf
from opensearch_lightning.argument_types import check_types
from opensearch_lightning.errors import ConfigurationError, OpenSearchError, one_line

CONFIG_NAME = "train"


def config_dir() -> Path:
    """The folder of the groups that ship with the package."""
    return Path(next(iter(conf.__path__))).resolve()


def compose_config(overrides: Sequence[str] = (), *, extra_dir: str | Path | None = None) -> dict[str, Any]:
    """The whole configuration of one run, interpolations resolved, as dicts, lists and scalars.

    Args:
        overrides: in Hydra's grammar: ``experiment=quickstart_grpo``, ``module.optimizer.lr=1e-4``,
            ``+trainer.devices=2``, ``~callbacks.trajectory_log``.
        extra_dir: a folder with groups of one's own, searched after those shipped.

    Raises:
        ConfigurationError: a setting, group or value that does not exist or cannot be read; one line that names it.
    """
    overrides = list(overrides)
    if extra_dir is not None:
        if not Path(extra_dir).is_dir():
            raise ConfigurationError(f"the config folder {str(extra_dir)!r} does not exist")
        overrides.append(f'hydra.searchpath=["file://{Path(extra_dir).resolve()}"]')
    try:
        return _compose(overrides)
    except MissingConfigException as error:
        raise ConfigurationError(_missing_group(error)) from error
    except OverrideParseException as error:
        raise ConfigurationError(_unreadable(str(error.override))) from error
    except MissingMandatoryValue as error:
        raise ConfigurationError(f"the setting {error.full_key!r} has no value; add {error.full_key}=…") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigurationError(_wrong_key(str(error), overrides)) from error


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(CONFIG_NAME, overrides=list(overrides))
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def to_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as YAML, in its own order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def _missing_group(error: MissingConfigException) -> str:
    wanted = str(error.missing_cfg_file or "")
    group, _, name = wanted.rpartition("/")
    if not error.options:
        return one_line(f"there is no configuration {wanted!r}")
    return f"there is no {group} {name!r}{_near(name, error.options)}; choose one of: {', '.join(error.options)}"


def _unreadable(override: str) -> str:
    example = "write key=value, and put a value that holds = , or brackets into quotes: 'ckpt_path=\"runs/a=b.ckpt\"'"
    return f"cannot read the setting {override!r}; {example}"


def groups() -> dict[str, list[str]]:
    """The configuration groups that ship, each with its choices; a group in a group as ``tools/text_search``."""
    choices: dict[str, list[str]] = {}
    for path in sorted(config_dir().glob("*/**/*.yaml")):
        choices.setdefault(path.parent.relative_to(config_dir()).as_posix(), []).append(path.stem)
    return choices


def _wrong_key(message: str, overrides: Sequence[str]) -> str:
    if message.startswith("Config group override"):
        return _wrong_choice(message, overrides)
    ambiguous = re.search(r"Ambiguous value for argument '(?P<key>[^=']+)=(?P<value>.*?)'\s", message)
    if ambiguous is not None:
        key, value = ambiguous["key"], ambiguous["value"]
        return (
            f"{key}={value} lists several values and one run takes one: choose one, write a list as '{key}=[{value}]', "
            f"or put a text with commas into quotes: '{key}=\"{value}\"'"
        )
    merging = re.search(r"Error merging override (?P<key>[^=]+)=(?P<value>.*)", message, re.DOTALL)
    if merging is not None:
        return _wrong_kind(merging["key"], merging["value"])
    found = re.search(r"Could not override '(?P<key>[^']+)'", message)
    if found is None:
        return one_line(message)
    key = found["key"]
    near = _near(key, list(_known_keys(key, overrides)))
    return f"there is no setting {key!r}{near}; see all with --print, or add a new one with +{key}=…"


def _wrong_kind(key: str, value: str) -> str:
    """A list where a mapping stands, or the like."""
    what = f"an empty list of {key.rpartition('.')[2]}" if value.strip() == "[]" else "another kind of value"
    return (
        f"{key}={value} gives {what} where the configuration has settings of their own; set those by {key}.<name>=… "
        f"(see all with --print), or leave it out"
    )


def _wrong_choice(message: str, overrides: Sequence[str]) -> str:
    """A group that was given no name: which, and the names that it takes."""
    known = groups()
    named = [override.partition("=") for override in overrides]
    wrong = [(key, value) for key, _, value in named if key in known and not re.match(r"[^\W\d]", value)]
    wrong += [(key, value) for key, _, value in named if key in known and value.lower() in ("null", "true", "false")]
    if not wrong:
        return one_line(message)
    key, value = wrong[0]
    return f"{key}={value} is no choice of the group {key!r}: it takes a name, one of {', '.join(known[key])}"


def _known_keys(wrong: str, overrides: Sequence[str]) -> Iterator[str]:
    """Dotted names of all settings of the run as it would be without the wrong one."""
    try:
        config = _compose([override for override in overrides if not override.startswith(wrong)])
    except (HydraException, OmegaConfBaseException):
        config = _compose([])
    return _dotted(config)


def _dotted(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def make(name: str, node: Any, shared: Mapping[str, Any]) -> Any:
    """Instantiate one node of the configuration.

    Args:
        name: dotted name of the node, for messages.
        node: a mapping with Hydra's ``_target_``; its key ``_shared_`` maps parameter names to names in ``shared``,
            or to attributes of such an object (``processor.tokenizer``). An argument may be such a mapping itself.
        shared: objects that several nodes need, by name: the policy, the engine, …

    Raises:
        ConfigurationError: the node cannot be built; the message is one line that names the node.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigurationError(f"the setting {name!r} is {node!r}; it must be a mapping with _target_")
    check_types(name, node)
    arguments = {key: _from_shared(name, str(path), shared) for key, path in (node.get("_shared_") or {}).items()}
    arguments |= {key: make(f"{name}.{key}", part, shared) for key, part in node.items() if _shares(part)}
    settings = {key: value for key, value in node.items() if key != "_shared_" and key not in arguments}
    with _one_line_errors(name):
        factory = instantiate({**settings, "_partial_": True}, _convert_="all")
    _check_arguments(name, factory, arguments)
    with _one_line_errors(name):
        return factory(**arguments)


def _shares(part: Any) -> bool:
    return isinstance(part, Mapping) and "_target_" in part and "_shared_" in part


def _from_shared(name: str, path: str, shared: Mapping[str, Any]) -> Any:
    first, *attributes = path.split(".")
    if first not in shared:
        raise ConfigurationError(
            f"{name} needs the shared object {first!r}, which this experiment does not build; "
            f"it builds: {', '.join(shared) or 'none'}"
        )
    try:
        return functools.reduce(getattr, attributes, shared[first])
    except AttributeError as error:
        raise ConfigurationError(
            f"{name} needs {path!r} of the shared objects, but {one_line(error)}; mend the path under _shared_"
        ) from error


def _check_arguments(name: str, factory: functools.partial[Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory.func)
    except ValueError:
        return
    try:
        signature.bind(*factory.args, **factory.keywords, **arguments)
    except TypeError as error:
        known = [key for key in signature.parameters if key not in arguments]
        wrong = [key for key in factory.keywords if key not in signature.parameters]
        near = _near(wrong[0], known) if wrong else ""
        raise ConfigurationError(
            f"{name}: {factory.func.__qualname__} {error}{near}; its settings are: {', '.join(known)}"
        ) from error


@contextlib.contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turns what goes wrong while a node is built into one line; ``HYDRA_FULL_ERROR=1`` lets it through."""
    try:
        yield
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        cause = error
        while isinstance(cause, InstantiationException) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        if type(cause) is ConfigurationError:
            raise ConfigurationError(_with_name(name, str(cause))) from cause
        if isinstance(cause, OpenSearchError):
            raise cause from cause.__cause__
        what = "" if isinstance(cause, InstantiationException) else f"{type(cause).__name__}: "
        raise ConfigurationError(
            f"cannot build {name}: {what}{one_line(cause)} (HYDRA_FULL_ERROR=1 shows where)"
        ) from error


def _with_name(name: str, message: str) -> str:
    return message if message.startswith(name) else f"{name}: {message}"
