"""ShareGPT records whose images stand in one folder."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.data.sources.files import read_records
from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.data.sources.sft import parse_sft


def parse_sharegpt(record: Any, *, name: str, image_root: Path | None = None) -> SFTRow:
    """Check one record and load its images, as :func:`~opensearch_lightning.data.parse_sft` does.

    Args:
        record: mapping with ``conversations`` and, optionally, ``id``, ``images``, ``system`` and ``tools``.
        name: id of the row when the record has none.
        image_root: folder of image paths.

    Raises:
        UnusableRow: with the reason.
    """
    return parse_sft(record, name=name, images=_store(image_root))


# A store lists its folder once, not once a row.
@functools.lru_cache(maxsize=8)
def _store(root: Path | None) -> ImageStore:
    return ImageStore(() if root is None else (root,))


def read_sharegpt(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Records of a JSON file (a list) or a JSON Lines file, each with its name ``file[index]``, one at a time.

    Raises:
        DataError: the file cannot be read, or is neither.
    """
    return read_records(path)
