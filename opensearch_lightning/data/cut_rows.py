"""Rows that are longer than training takes, cut behind a turn of the policy, and how long they are then."""

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from opensearch_lightning.chat import TokenizedSample, cut_at_turn
from opensearch_lightning.data.lengths import Lengths, kept_numbers
from opensearch_lightning.data.order.streams import Rows
from opensearch_lightning.data.samples import SampleSource


def cut_sample(source: SampleSource, sample: TokenizedSample, max_length: int) -> TokenizedSample | None:
    """:func:`~opensearch_lightning.chat.cut_at_turn` of a sample of ``source``."""
    renderer = source.renderer
    return cut_at_turn(sample, max_length, image_token_id=renderer.image_token_id, merge_size=renderer.merge_size)


def cut_lengths(
    source: SampleSource, lengths: Lengths, *, max_length: int, num_workers: int = 0, folder: Path | None = None
) -> Lengths:
    """Tokens of every row where too long ones are cut; a row whose first turn of the policy does not fit keeps its own.

    Args:
        source: the rows.
        lengths: tokens of each, whole.
        max_length: most tokens of a row.
        num_workers: processes that count.
        folder: where to keep the result, as :func:`~opensearch_lightning.data.lengths.measure` does.
    """
    rows = np.flatnonzero(lengths > max_length)
    cut = kept_numbers(
        _CutRows(source, rows, max_length),
        len(rows),
        folder / f"cut-{source.digest[:32]}-{max_length}.json" if folder is not None else None,
        # processes cost more than they save on a few rows
        num_workers=num_workers if len(rows) > num_workers else 0,
    )
    shortened = lengths.copy()
    shortened[rows] = np.where(cut > 0, cut, lengths[rows])
    return shortened


class _CutRows(Dataset[int]):
    """Tokens of each of ``rows`` when cut; 0 for one that cannot be."""

    def __init__(self, source: SampleSource, rows: Rows, max_length: int) -> None:
        self._source, self._rows, self._max_length = source, rows, max_length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> int:
        cut = cut_sample(self._source, self._source.sample(int(self._rows[place])), self._max_length)
        return len(cut.token_ids) if cut is not None else 0
