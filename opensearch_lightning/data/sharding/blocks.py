"""Sources cut into blocks of records that processes take one by one."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from opensearch_lightning.data.sources import Source
from opensearch_lightning.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Block:
    """Neighbouring records of one source.

    Args:
        number: place among all blocks of all sources, from 0.
        source: place of its source.
        rows: number of records.
        records: file of pickled pairs of a name and a record, one behind the other; none is there for a block that
            nobody wanted.
        duplicates: places in the block of records to leave out, for they repeat earlier ones.
        new_ids: ids in place of ones that other records have, by place in the block.
    """

    number: int
    source: int
    rows: int
    records: Path
    duplicates: frozenset[int] = frozenset()
    new_ids: Mapping[int, str] = field(default_factory=dict)


def cut_blocks(
    sources: Sequence[Source], folder: Path, *, rows: int, weight: int, wanted: Callable[[int], bool]
) -> Iterator[Block]:
    """Cut the records of sources into blocks; where is a function of the records and the two limits alone.

    Records go to a file each block rather than through memory: those that hold their images are large.

    Args:
        sources: in order; a block never spans two.
        folder: takes the files.
        rows: most records of a block.
        weight: bytes of text and images in the records themselves behind which a block ends.
        wanted: whether the block of a number shall have its file.

    Raises:
        DataError: a source cannot be read, or a record is nested too deep.
    """
    numbers = count()
    for place, source in enumerate(sources):
        records = iter(source.records())
        for number in numbers:
            path = folder / f"{number:06d}.records"
            taken = _take(records, path if wanted(number) else None, rows, weight)
            if taken == 0:
                # the number goes to the next source's first block
                numbers = count(number)
                break
            yield Block(number=number, source=place, rows=taken, records=path)


def read_block(path: Path) -> Iterator[tuple[str, Any]]:
    """The names and records of a block's file."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def _take(records: Iterator[tuple[str, Any]], path: Path | None, rows: int, weight: int) -> int:
    taken = weighed = 0
    file = path.open("wb") if path is not None else None
    try:
        while taken < rows and weighed < weight:
            item = next(records, None)
            if item is None:
                break
            try:
                weighed += _weight(item[1])
                if file is not None:
                    pickle.dump(item, file, protocol=pickle.HIGHEST_PROTOCOL)
            except RecursionError as error:
                raise DataError(f"{item[0]} is nested too deep; mend or remove it.") from error
            taken += 1
    finally:
        if file is not None:
            file.close()
    if taken == 0 and path is not None:
        path.unlink(missing_ok=True)
    return taken


def _weight(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_weight, value))
    return 8
