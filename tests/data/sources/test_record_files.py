import gzip
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensearch_lightning.data import read_records
from opensearch_lightning.data.sources import json_stream
from opensearch_lightning.errors import DataError

RECORDS: list[Any] = [{"a": 1, "b": [1.5, None]}, {"a": "ü\u2028<image>"}, {}]


def lines(records: list[Any]) -> str:
    return "\n".join(map(json.dumps, records))


def read(path: Path) -> list[Any]:
    return [record for _, record in read_records(path)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", json.dumps(RECORDS, ensure_ascii=False, indent=1)),
        ("rows.json", "\ufeff" + json.dumps(RECORDS)),
        ("rows.json", json.dumps({"version": [1, {"x": 2}], "data": RECORDS, "end": None})),
        ("rows.json", lines(RECORDS)),
        ("rows.jsonl", lines(RECORDS)),
        ("rows.ndjson", "\ufeff" + lines(RECORDS).replace("\n", "\r\n\r\n \n")),
        ("ROWS.JSONL", lines(RECORDS) + "\n"),
    ],
)
def test_each_form_gives_the_records_with_names(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    expected = [(f"{name}[{index}]", record) for index, record in enumerate(RECORDS)]
    assert list(read_records(tmp_path / name)) == expected
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(packed) == RECORDS


def test_parquet_gives_bytes_and_nested_values(tmp_path: Path) -> None:
    records = [{"images": [{"bytes": b"\x00\xff", "path": None}], "n": index} for index in range(40)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet", row_group_size=7)
    assert read(tmp_path / "rows.parquet") == records


@pytest.mark.parametrize("records", [[], [1, "a", None]])
def test_empty_lists_and_lists_of_anything_are_lists(tmp_path: Path, records: list[Any]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(records))
    assert read(tmp_path / "rows.json") == records


def test_values_are_those_of_json_loads(tmp_path: Path) -> None:
    """Half a surrogate pair stays to be seen, NaN is none of the file's faults, and no number is rounded."""
    text = r'[{"a": "\ud800 x", "b": NaN, "c": 123456789012345678901234567890, "d": 1e400, "e": "\ud83d\ude00"}]'
    (tmp_path / "rows.json").write_text(text)
    (record,) = read(tmp_path / "rows.json")
    assert record["a"] == "\ud800 x"
    assert math.isnan(record["b"])
    assert record["c"] == 123456789012345678901234567890
    assert record["e"] == "😀"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(records=st.lists(VALUES, max_size=6), at_once=st.integers(1, 40), ascii_only=st.booleans())
def test_any_list_is_read_as_it_is_wherever_it_is_cut(
    tmp_path_factory: Any, records: list[Any], at_once: int, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.json"
    text = json.dumps(records, ensure_ascii=ascii_only, indent=at_once % 3 or None)
    path.write_bytes(text.encode(errors="surrogatepass") if ascii_only else text.encode(errors="replace"))
    expected = json.loads(path.read_bytes().decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_READ", at_once)
        assert repr(read(path)) == repr(expected)


def cut(text: str) -> Callable[[Path], None]:
    return lambda path: (path.write_text(text), None)[1]


@pytest.mark.parametrize(
    ("name", "text", "n_before", "message"),
    [
        ("a.json", '[{"a": 1}, {"a": 2}', 2, "behind 2 records: expected , or ] at character 19, met the end"),
        ("a.json", '[{"a": 1}, {"a": "cut', 1, "behind 1 records: Unterminated string"),
        ("a.json", '[{"a": 1}, {"a" 2}]', 1, "behind 1 records: Expecting ':' delimiter at character 16"),
        ("a.json", '[{"a": 1}] [2]', 1, "more behind the end of the list, at character 11"),
        ("a.json", "[" * 100_000, 0, "nested too deep"),
        ("a.json", "", 0, "met the end of the file"),
        ("a.json", "3", 0, "holds a int, not a list of rows"),
        ("a.json", '{"a": 1, "b": 2}', 0, "one object with the keys .*'a', 'b'.*put the rows into a list"),
        ("a.json", '{"data": 3, "x": [1', 0, "cut short"),
        ("a.jsonl", '{"a": 1}\n\n{"a": \n{"a": 3}', 1, "line 3 is no JSON .*mend or remove the line"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100_000, 1, "line 2 is no JSON .it is nested too deep"),
        ("a.txt", "x", 0, "no file of records; give .json"),
        ("a.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0", 0, "pointer of Git LFS.*git lfs pull"),
    ],
)
def test_broken_files_are_named_with_the_place(
    tmp_path: Path, name: str, text: str, n_before: int, message: str
) -> None:
    (tmp_path / name).write_text(text)
    seen = []
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        seen.extend(iter_into(seen, tmp_path / name))
    assert len(seen) == n_before


def iter_into(seen: list[Any], path: Path) -> list[Any]:
    for record in read_records(path):
        seen.append(record)
    return []


def test_a_broken_value_is_found_without_reading_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_READ", 64)
    (tmp_path / "a.json").write_text('[{"a": oops}, ' + '"long", ' * 1000 + "1]")
    with pytest.raises(DataError, match="behind 0 records: Expecting value at character 7"):
        read(tmp_path / "a.json")
    stream = json_stream.JSONStream((tmp_path / "a.json").open("rb"))
    stream.skip("[")
    with pytest.raises(ValueError, match="Expecting value"):
        stream.value()
    assert stream._file.tell() < 300
    stream._file.close()


@pytest.mark.parametrize("damage", ["cut", "head", "not utf-8"])
def test_binary_damage_is_an_error_of_the_file(tmp_path: Path, damage: str) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS[:1] * 500), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-9] if damage == "cut" else b"XXXX" + whole[4:-4] + b"XXXX")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS * 100).encode())[:-20])
    (tmp_path / "b.json").write_bytes(b'[{"a": "\xff\xfe"}]')
    (tmp_path / "c.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff\xfe"}')
    for name, message in [
        ("a.parquet", "a.parquet cannot be read as Parquet behind 0 rows.*fetch or write it anew"),
        ("a.json.gz", "a.json.gz cannot be read"),
        ("b.json", "b.json is no UTF-8 behind 0 records"),
        ("c.jsonl", "c.jsonl, line 2 is no JSON"),
        ("missing.json", "missing.json cannot be read: No such file"),
    ]:
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)


MEASURED = """
import resource, sys
from opensearch_lightning.data.sources.files import read_records
next(read_records(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_records(sys.argv[2]))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(resource.getpagesize() == 0 or sys.platform != "linux", reason="ru_maxrss counts KiB on Linux")
def test_large_files_are_streamed(tmp_path: Path) -> None:
    """50 MB of JSON, and as much Parquet in one row group, raise the peak of memory by less than half of that."""
    row = {"conversations": [{"from": "human", "value": "x" * 500 + "ü"}, {"from": "gpt", "value": "y" * 500}]}
    n_rows = 50_000
    with (tmp_path / "large.json").open("w") as file:
        file.write("[" + json.dumps(row))
        file.writelines([", " + json.dumps(row)] * (n_rows - 1))
        file.write("]")
    (tmp_path / "small.json").write_text(json.dumps([row]))
    blobs = pa.table({"image": [index.to_bytes(4, "big") * 12_500 for index in range(1_000)]})
    pq.write_table(blobs, tmp_path / "large.parquet", row_group_size=1_000, compression="none", use_dictionary=False)
    pq.write_table(blobs.slice(0, 1), tmp_path / "small.parquet")
    for suffix, count in (("json", n_rows), ("parquet", 1_000)):
        assert (tmp_path / f"large.{suffix}").stat().st_size > 50e6
        command = [sys.executable, "-c", MEASURED, tmp_path / f"small.{suffix}", tmp_path / f"large.{suffix}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        counted, grown_mib = map(int, done.stdout.split())
        assert counted == count
        assert grown_mib < 24, f"{suffix}: {grown_mib} MiB"
