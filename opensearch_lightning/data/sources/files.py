"""Records of JSON, JSON Lines and Parquet files, one at a time."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from opensearch_lightning.data.sources.json_stream import JSONStream
from opensearch_lightning.errors import DataError, one_line

LINES = (".jsonl", ".ndjson")
SUFFIXES = (".json", *LINES, ".parquet")
_LFS = b"version https://git-lfs"
_ROWS_KEY = "data"
_LONGEST_FIRST_LINE = 64 * 2**20
_ROWS_AT_ONCE = 16


def record_suffix(path: Path) -> str | None:
    """The suffix that says how to read a file, without ``.gz``; ``None`` for a file that holds no records."""
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    return suffix if suffix in SUFFIXES and not (packed and suffix == ".parquet") else None


def stem(path: Path) -> str:
    """Name of a record file without its suffixes."""
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def read_records(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Records of one file in its order, each with its name ``file[index]``; memory does not grow with the file.

    Args:
        path: ``.json`` (a list, an object with the list under ``data``, or JSON Lines under that name), ``.jsonl``,
            ``.ndjson``, each also with ``.gz``; or ``.parquet``.

    Raises:
        DataError: the file cannot be read or ends too early, a line or value is broken; names the file, the place and
            the remedy. Records before that place were yielded.
    """
    path = Path(path)
    suffix = record_suffix(path)
    if suffix is None:
        raise DataError(
            f"{path} is no file of records; give one of {', '.join(SUFFIXES)}, the first three also as .gz."
        )
    check_pointer(path)
    for index, record in enumerate(_parquet_rows(path) if suffix == ".parquet" else _json_rows(path, suffix)):
        yield f"{path.name}[{index}]", record


def check_pointer(path: Path) -> None:
    """Refuse a file that Git LFS has not fetched.

    Raises:
        DataError: it is a pointer, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if head == _LFS:
        raise DataError(f"{path} is a pointer of Git LFS, not the file; fetch it with `git lfs pull`.")


def _json_rows(path: Path, suffix: str) -> Iterator[Any]:
    try:
        with _opened(path) as file:
            if suffix in LINES or _has_lines(file):
                yield from _lines(file, path)
            else:
                yield from _items(file, path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; fetch or write it anew.") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _has_lines(file: BinaryIO) -> bool:
    """Whether a file called JSON holds JSON Lines: an object on its first line, and more behind it."""
    first = file.readline(_LONGEST_FIRST_LINE)
    has_more = bool(file.read(2**16).strip())
    file.seek(0)
    try:
        return has_more and isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _lines(file: BinaryIO, path: Path) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else one_line(error)
            raise DataError(
                f"{path}, line {number} is no JSON ({reason}); mend or remove the line, or fetch the file anew."
            ) from error


def _items(file: BinaryIO, path: Path) -> Iterator[Any]:
    stream = JSONStream(file)
    count = 0
    try:
        for record in _list_of(stream, path):
            yield record
            count += 1
        if stream.peek():
            raise ValueError(f"there is more behind the end of the list, at character {stream.position}")
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 behind {count} records: {error}; write it as UTF-8.") from error
    except ValueError as error:
        raise DataError(
            f"{path} is broken or cut short behind {count} records: {error}; fetch or write it anew."
        ) from error


def _list_of(stream: JSONStream, path: Path) -> Iterator[Any]:
    first = stream.peek()
    if first != "{":
        if first not in ("[", ""):
            raise DataError(f"{path} holds a {type(stream.value()).__name__}, not a list of rows.")
        yield from stream.items()
        return
    stream.skip("{")
    keys = []
    while stream.peek() != "}":
        keys.append(stream.value())
        stream.skip(":")
        if keys[-1] == _ROWS_KEY and stream.peek() == "[":
            yield from stream.items()
        else:
            stream.value()
        if stream.peek() != "}":
            stream.skip(",")
    stream.skip("}")
    if _ROWS_KEY not in keys:
        raise DataError(
            f"{path} holds one object with the keys {keys[:8]!r:.200}, not a list of rows; put the rows into a list, "
            f"under {_ROWS_KEY!r}, or one a line into a .jsonl file."
        )


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    index = 0
    try:
        # Without a buffer size, whole columns of a row group are read: all images of it at once.
        with pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for record in batch.to_pylist():
                    yield record
                    index += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet behind {index} rows ({one_line(error)[:200]}); fetch or write it anew."
        ) from error
