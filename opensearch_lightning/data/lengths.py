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
from opensearch_lightning.data.drops import DropReason, DropReport
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import RenderError

_log = logging.getLogger(__name__)
_CODES = {DropReason.BROKEN_IMAGE: -1, DropReason.CONTROL_STRINGS_IN_TOOLS: -2}
Lengths = NDArray[np.int64]


def measure(source: SampleSource, *, num_workers: int = 0, folder: Path | None = None) -> Lengths:
    """Tokens of every row, image tokens counted; below 0 for one that cannot be rendered, by reason.

    Image tokens follow from the sizes of the images, so that no patches are made.

    Args:
        source: the rows.
        num_workers: processes that count.
        folder: where to keep the result. It is found again for the same rows, processor and tools only.
    """
    path = lengths_file(folder, source) if folder is not None else None
    if path is not None and path.exists():
        return np.array(json.loads(path.read_text()), dtype=np.int64)
    loader = DataLoader(
        _Measured(source),
        batch_size=None,
        num_workers=num_workers,
        generator=torch.Generator(),  # the global one stays as it is, whether or not the result was kept
    )
    lengths = np.fromiter(loader, dtype=np.int64, count=len(source))
    if path is not None:
        write_lengths(path, lengths.tolist())
    return lengths


def lengths_file(folder: Path, source: SampleSource) -> Path:
    """Where the lengths of these rows under this processor and these tools are kept."""
    return folder / f"lengths-{source.digest[:32]}.json"


def code_of(error: RenderError) -> int:
    """What stands in place of the length of a row that cannot be rendered."""
    held = isinstance(error, ControlStringError)
    return _CODES[DropReason.CONTROL_STRINGS_IN_TOOLS if held else DropReason.BROKEN_IMAGE]


def write_lengths(path: Path, lengths: Sequence[int]) -> None:
    """Keep lengths as :func:`measure` finds them again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks may write at once; each replaces the file by the same content.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
        json.dump(list(lengths), file)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)


def usable(source: SampleSource, lengths: Lengths, *, max_length: int, max_dropped: float) -> tuple[Lengths, Lengths]:
    """Leave out the rows that cannot be rendered or are too long; those are dropped whole, never cut.

    Returns:
        Indices of the usable rows, and their lengths.

    Raises:
        DataError: more than ``max_dropped`` of the rows are unusable; the message names them.
    """
    room = f"raise max_length={max_length} (too_long=cut keeps of a row what fits)"
    is_long = bool((lengths > max_length).any())
    report = DropReport("SFT shards", limit=max_dropped, remedy=room if is_long else "mend the source")
    for reason, code in _CODES.items():
        for index in np.flatnonzero(lengths == code):
            report.drop(reason, source.name(int(index)))
    for index in np.flatnonzero(lengths > max_length):
        report.drop(DropReason.TOO_LONG, f"{source.name(int(index))}: {lengths[index]} tokens")
    rows = np.flatnonzero((lengths >= 0) & (lengths <= max_length))
    report.kept = len(rows)
    report.check()
    if report.n_dropped:
        _log.warning("%s", report)
    return rows, lengths[rows]


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
            return code_of(error)
