"""One data source on disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.data.sources.image_store import ImageStore


@dataclass(frozen=True, kw_only=True)
class Source:
    """Record files and the images that belong to them.

    ``name`` is the name of the folder or the stem of the file.
    """

    name: str
    files: tuple[Path, ...]
    images: ImageStore

    def records(self) -> Iterator[tuple[str, Any]]:
        """Raw records of all files in order, each with a name unique within the source."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the content, as JSON: equal for equal record files and image archives."""
        raise NotImplementedError


def open_source(path: Path | str, *, images: Path | str | None = None, allow_urls: bool = False) -> Source:
    """Open a record file or a folder of them.

    Args:
        path: a file, or a folder that is one subset of a release.
        images: folder or zip file of the images; found beside the records when not given.
        allow_urls: fetch images that are given by URL, from public addresses only.

    Raises:
        DataError: nothing to read there, or a folder of several subsets; names what to give instead.
    """
    raise NotImplementedError
