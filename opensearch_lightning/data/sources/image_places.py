"""Folders and zip files of images, read where they stand."""

import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.images import read_below
from opensearch_lightning.data.sources.files import check_pointer
from opensearch_lightning.errors import DataError, one_line
from opensearch_lightning.pictures import MAX_BYTES

_SAYS_UTF8 = 0x800


class ImagePlace(Protocol):
    """Where images stand under names of the form ``a/b.png``."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    def names(self) -> Iterable[str]:
        """All names."""

    def holds(self, name: str) -> bool:
        """Whether there is an image of exactly this name."""

    def read(self, name: str) -> bytes:
        """The file of this name.

        Raises:
            UnusableRow: it is missing or broken.
        """


class ImageFolder:
    """A folder; links that lead out of it are not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> Iterable[str]:
        """All names below the folder."""
        for top, _, files in os.walk(self.path):
            below = Path(top).relative_to(self.path)
            for file in files:
                yield (below / file).as_posix()

    def holds(self, name: str) -> bool:
        """Whether there is a file of exactly this name."""
        try:
            return (self.path / name).is_file()
        except (OSError, ValueError):
            return False

    def read(self, name: str) -> bytes:
        """The file of this name.

        Raises:
            UnusableRow: it is missing, or lies outside.
        """
        return read_below(self.path, name)


class ImageArchive:
    """A zip file, opened once in each process: a handle that crossed a fork would share its position.

    Raises:
        DataError: it is no zip file, or a pointer of Git LFS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile, dict[str, zipfile.ZipInfo]] | None = None
        check_pointer(path)
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} is no zip file or is cut short; fetch it anew.")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": None}

    def names(self) -> Iterable[str]:
        """All names that stay below a root."""
        return iter(self._open()[1])

    def holds(self, name: str) -> bool:
        """Whether there is an entry of exactly this name."""
        return name in self._open()[1]

    def read(self, name: str) -> bytes:
        """The entry of this name, unpacked in memory.

        Raises:
            UnusableRow: it is missing, too large, broken, or packed in a way that is not read.
        """
        archive, entries = self._open()
        entry = entries.get(name)
        if entry is None:
            raise UnusableRow(DropReason.MISSING_IMAGE, f"{name!r:.200} is not in {self.path}.")
        if entry.file_size > MAX_BYTES:
            raise UnusableRow(DropReason.BROKEN_IMAGE, f"{name!r:.200} in {self.path} has more than {MAX_BYTES} bytes.")
        try:
            return archive.read(entry)
        # Also: an entry with a password, or of a method that this Python cannot unpack.
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            reason = one_line(error)[:200]
            raise UnusableRow(
                DropReason.BROKEN_IMAGE, f"{name!r:.200} in {self.path} cannot be unpacked: {reason}."
            ) from error

    def _open(self) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            try:
                archive = zipfile.ZipFile(self.path)
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                raise DataError(
                    f"{self.path} cannot be read as a zip file: {one_line(error)}; fetch it anew."
                ) from error
            entries = {name: entry for entry in archive.infolist() if _is_image_name(name := _name(entry))}
            self._opened = process, archive, entries
        return self._opened[1:]


def image_place(path: Path) -> ImagePlace:
    """The folder or zip file at ``path``.

    Raises:
        DataError: it is neither.
    """
    if path.is_dir():
        return ImageFolder(path)
    if not path.exists():
        raise DataError(f"there are no images at {path}; give a folder or a zip file.")
    return ImageArchive(path)


def _name(entry: zipfile.ZipInfo) -> str:
    """Name of an entry; many tools write UTF-8 and do not say so."""
    if entry.flag_bits & _SAYS_UTF8 or entry.filename.isascii():
        return entry.filename
    try:
        return entry.filename.encode("cp437").decode()
    except UnicodeError:
        return entry.filename


def _is_image_name(name: str) -> bool:
    parts = name.split("/")
    stays_below = not name.startswith("/") and ".." not in parts
    # Archives made on a Mac hold a shadow of each file.
    is_shadow = parts[0] == "__MACOSX" or parts[-1].startswith("._")
    return bool(parts[-1]) and stays_below and not is_shadow
