"""How many tokens each row has: measured once, kept from one start to the next."""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from opensearch_lightning.chat import ControlStringError
from opensearch_lightning.data.drops import DropReason
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import DataError, RenderError, one_line

_log = logging.getLogger(__name__)
Lengths = NDArray[np.int64]
UNRENDERABLE = {DropReason.BROKEN_IMAGE: -1, DropReason.CONTROL_STRINGS_IN_TOOLS: -2}
"""What stands in place of the length of a row that cannot be rendered."""


def measure(source: SampleSource, *, num_workers: int = 0, folder: Path | None = None) -> Lengths:
    """Tokens of every row, image tokens counted; one of :data:`UNRENDERABLE` for one that cannot be rendered.

    Image tokens follow from the sizes of the images, so that no patches are made.

    Args:
        source: the rows.
        num_workers: processes that count.
        folder: where to keep the result. It is found again for the same rows, processor and tools only.

    Raises:
        DataError: what is kept is damaged, or not as many lengths as there are rows.
    """
    path = lengths_file(folder, source) if folder is not None else None
    return kept_numbers(_Measured(source), len(source), path, num_workers=num_workers)


def kept_numbers(numbers: Dataset[int], count: int, path: Path | None, *, num_workers: int = 0) -> Lengths:
    """The numbers that a file keeps; without the file those of a data set, which are then kept there.

    Args:
        numbers: works out each of them.
        count: how many there are.
        path: the file; ``None`` keeps nothing.
        num_workers: processes that work them out.
    """
    if path is not None and path.exists():
        return read_lengths(path, count)
    loader = DataLoader(
        numbers,
        batch_size=None,
        num_workers=num_workers,
        generator=torch.Generator(),  # the global one stays as it is, whether or not the result was kept
    )
    found = np.fromiter(loader, dtype=np.int64, count=count)
    if path is not None:
        write_lengths(path, found.tolist())
    return found


def lengths_file(folder: Path, source: SampleSource) -> Path:
    """Where the lengths of these rows under this processor and these tools are kept."""
    return folder / f"lengths-{source.digest[:32]}.json"


def length_in_place_of(error: RenderError) -> int:
    """Of :data:`UNRENDERABLE`, the number that tells why a row cannot be rendered."""
    held = isinstance(error, ControlStringError)
    return UNRENDERABLE[DropReason.CONTROL_STRINGS_IN_TOOLS if held else DropReason.BROKEN_IMAGE]


def write_lengths(path: Path, lengths: Sequence[int]) -> None:
    """Keep lengths as :func:`measure` finds them again.

    Raises:
        DataError: they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may write at once; each replaces the file by the same content.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
            json.dump(list(lengths), file)
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise DataError(
            f"lengths cannot be kept at {path}: {error}; make room there, or name another folder."
        ) from error


def read_lengths(path: Path, rows: int) -> Lengths:
    """Lengths that :func:`write_lengths` kept.

    Raises:
        DataError: the file cannot be read, or does not hold a whole number for each of ``rows`` rows.
    """
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as kept lengths: {one_line(error)[:200]}; remove it.") from error
    if not isinstance(kept, list) or not all(type(length) is int and abs(length) < 2**63 for length in kept):
        raise DataError(f"{path} holds no list of lengths; remove it.")
    if len(kept) != rows:
        raise DataError(f"{path} has kept lengths for {len(kept)} rows, there are {rows}; remove it.")
    return np.array(kept, dtype=np.int64)


class _Measured(Dataset[int]):
    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> int:
        try:
            return self._source.length(index)
        except RenderError as error:
            _log.warning("row %s cannot be used: %s", self._source.name(index), error)
            return length_in_place_of(error)
