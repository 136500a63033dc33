"""Whether a path can be written, asked before the work whose result shall lie there; and folders that appear whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opensearch_lightning.errors import ConfigurationError


def check_folder(setting: str, folder: Path) -> None:
    """See that files can be written into ``folder``, which may be yet to be made; nothing is written.

    Args:
        setting: what the message calls it.
        folder: the folder.

    Raises:
        ConfigurationError: a file is in its way, or the permission is missing.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigurationError(f"{setting}={folder} cannot be a folder: {there} is a file; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{setting}={folder} cannot be written: no permission in {there}; choose another path, or change its mode"
        )


def check_file(setting: str, file: Path) -> None:
    """See that ``file`` can be written or replaced; its folder may be yet to be made, and nothing is written.

    Raises:
        ConfigurationError: it is a folder, or cannot be written.
    """
    if file.is_dir():
        raise ConfigurationError(f"{setting}={file} is a folder; give the name of a file in it")
    check_folder(setting, file.absolute().parent)
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigurationError(f"{setting}={file} cannot be written: no permission; choose another path")


def put_in_place(finished: Path, target: Path) -> None:
    """Give a folder its name, in place of what has it; that is removed only when the new one stands there.

    Args:
        finished: the folder, on the disk of ``target``.
        target: the name.
    """
    older = target.with_name(f".{target.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if target.exists():
        target.rename(older)
    finished.rename(target)
    shutil.rmtree(older, ignore_errors=True)
