"""Records of JSON, JSON Lines and Parquet files, one at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_records(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Records of one file in its order, each with its name ``file[index]``; memory does not grow with the file.

    Raises:
        DataError: the file cannot be read; names the file, the place and the remedy.
    """
    raise NotImplementedError
