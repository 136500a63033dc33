"""One data source on disk: its record files, and where its images are."""

import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.data.digests import json_digest
from opensearch_lightning.data.shards import META
from opensearch_lightning.data.sources.files import SUFFIXES, check_pointer, read_records, record_suffix, stem
from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.data.sources.image_urls import fetch_image
from opensearch_lightning.errors import DataError

# How the releases of Search-VL-SFT-36K and Search-VL-RL-8K call their record files.
_RELEASED = re.compile(r"(.*_llama_factory_(clean|filtered)\.json|rl_data\.jsonl)")
_NO_RECORDS = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "index.json",
}
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|val|valid|validation|dev)(?=[-_.]|$)")
# Where the Hugging Face hub keeps the Parquet files of a data set.
_HUB_FOLDER = "data"
_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Source:
    """Record files and the images that belong to them; picklable.

    ``name`` is the name of the folder, or that of the file without its suffix.
    """

    name: str
    files: tuple[Path, ...]
    images: ImageStore

    def records(self) -> Iterator[tuple[str, Any]]:
        """Raw records of all files in order, each with its name ``file[index]``, unique within the source.

        Raises:
            DataError: a file cannot be read; see :func:`~opensearch_lightning.data.read_records`.
        """
        for file in self.files:
            yield from read_records(file)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the content, as JSON: SHA-256 of the record files and of the image archives' directories.

        A directory has the checksum of each image; the archives themselves are too large to be read at each start. Of
        a folder of images only the name is told.
        """
        archives = [path for path in self.images.paths if path.is_file()]
        return {
            "records": [{**_named(file), "sha256": _sha256(file)} for file in self.files],
            "archives": [{**_named(file), "entries": _entries(file)} for file in archives],
            "folders": [path.name for path in self.images.paths if path.is_dir()],
        }


def open_source(path: Path | str, *, images: Path | str | None = None, allow_urls: bool = False) -> Source:
    """Open a record file or a folder of them. Nothing is read yet.

    A folder is one data set: one subset of the Search-VL releases (its ``*_llama_factory_*.json`` or ``rl_data.jsonl``
    beside its ``images.zip``), or any record files that belong together. A folder whose record files lie in several
    folders below it is refused: each of these is a source.

    Args:
        path: a file of :func:`~opensearch_lightning.data.read_records`, or a folder of such files.
        images: folder or zip file of the images; by default the folder of the records and the zip files in it.
        allow_urls: fetch images that are given by URL, from public addresses only. Needs the extra ``online``.

    Raises:
        DataError: there are no record files, or those of several data sets, splits or versions of one; names what to
            give instead.
    """
    path = Path(path)
    if path.is_dir():
        name, folder, files = path.resolve().name, path, _files_of(path)
    elif path.is_file():
        name, folder, files = stem(path), path.parent, [path]
        if record_suffix(path) is None:
            raise DataError(f"{path} is no file of records; give one of {', '.join(SUFFIXES)}, or a folder of them.")
    else:
        raise DataError(f"{path} does not exist; give a file of records or a folder of them.")
    for file in files:
        check_pointer(file)
    places = _with_archives(folder) if images is None else _with_archives(Path(images))
    store = ImageStore(places, fetch=fetch_image if allow_urls else None)
    return Source(name=name, files=tuple(files), images=store)


def _with_archives(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    return [place, *sorted(file for file in place.iterdir() if file.suffix.lower() == ".zip" and file.is_file())]


def _files_of(folder: Path) -> list[Path]:
    if (folder / META).exists():
        raise DataError(f"{folder} holds shards already; give the source that they were written from.")
    files = _record_files(folder)
    if not files and (folder / _HUB_FOLDER).is_dir():
        files = _record_files(folder / _HUB_FOLDER)
    if not files:
        below = sorted(inner for inner in folder.iterdir() if inner.is_dir() and _record_files(inner))
        if below:
            raise DataError(
                f"{folder} has its records in the folders below it; give each of them as a source of its own: "
                f"{_listed(below)}."
            )
        raise DataError(f"{folder} holds no file of records ({', '.join(SUFFIXES)}).")
    released = [file for file in files if _RELEASED.fullmatch(file.name)]
    if len(released) > 1:
        raise DataError(f"{folder} holds several versions of its records; give one of them: {_listed(released)}.")
    files = released or files
    splits = {match[1] for file in files if (match := _SPLIT.search(stem(file).lower())) is not None}
    if len(splits) > 1:
        raise DataError(
            f"{folder} holds several splits ({', '.join(sorted(splits))}); give the files to use: {_listed(files)}."
        )
    return files


def _record_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and record_suffix(file) is not None
        and file.name not in _NO_RECORDS
        and not file.name.startswith(".")
    )


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:_NAMED])) + (", …" if len(paths) > _NAMED else "")


def _named(file: Path) -> dict[str, Any]:
    return {"name": file.name, "size": file.stat().st_size}


def _entries(archive: Path) -> str:
    with zipfile.ZipFile(archive) as opened:
        entries = [[entry.filename, entry.file_size, entry.CRC] for entry in opened.infolist()]
    return json_digest(entries)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
