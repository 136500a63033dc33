import ast
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import opensearch_lightning.data
from opensearch_lightning.data import ShardKind, ShardReader, write_rl_shards, write_sft_shards, write_shards
from opensearch_lightning.data.rows import rl_task, sft_row
from opensearch_lightning.errors import DataError
from opensearch_lightning.types import Task
from tests.data.rows import picture, rl_shards, row, sft_shards, task


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_rows_come_back_whole_and_in_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [
        ({"id": i, "text": "é" * i}, [rng.randbytes(rng.randrange(300)) for _ in range(i % 5)]) for i in range(300)
    ]
    # small chunks: the rows lie in many files
    assert write_shards(records, tmp_path / "s", kind=ShardKind.SFT, chunk_bytes=10_000) == 300
    assert len(list((tmp_path / "s").glob("*.bin"))) > 5
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    assert len(reader) == 300
    for i in rng.sample(range(300), 300):
        assert reader[i] == (records[i][0], tuple(records[i][1]))


def test_rows_without_images_and_empty_images_come_back(tmp_path: Path) -> None:
    records: list[Any] = [({"id": 0}, []), ({"id": 1}, [b""]), ({"id": 2}, [b"", b"x", b""]), ({"id": 3}, [])]
    write_shards(records, tmp_path / "s", kind=ShardKind.SFT)
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    assert [reader[i] for i in range(4)] == [(record, tuple(images)) for record, images in records]


def test_layout_is_that_of_litdata(tmp_path: Path) -> None:
    from litdata import StreamingDataset

    sft_shards(tmp_path / "s", 3)
    sample = StreamingDataset(str(tmp_path / "s"))[1]
    assert sorted(sample) == ["blob", "record", "sizes"]
    assert json.loads(bytes(sample["record"]))["id"] == "row-1"
    assert json.loads(bytes(sample["sizes"])) == [len(picture(1))]
    assert bytes(sample["blob"].numpy()) == picture(1)


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    assert digests(sft_shards(tmp_path / "a")) == digests(sft_shards(tmp_path / "b"))


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    sft_shards(tmp_path / "s", 3)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == ["s"]


def test_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    before = digests(sft_shards(tmp_path / "s", 3))
    with pytest.raises(DataError, match=r"s exists already; remove it"):
        sft_shards(tmp_path / "s", 4)
    assert digests(tmp_path / "s") == before


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        yield {"id": 0}, [b"x"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(rows(), tmp_path / "s", kind=ShardKind.SFT)
    assert list(tmp_path.iterdir()) == []


def test_no_rows_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        write_shards([], tmp_path / "s", kind=ShardKind.SFT)
    with pytest.raises(DataError, match="row 'x' cannot be stored as JSON"):
        write_shards([({"id": "x", "bad": float("nan")}, [])], tmp_path / "s", kind=ShardKind.SFT)
    assert list(tmp_path.iterdir()) == []


def test_folders_join_in_order(tmp_path: Path) -> None:
    rl_shards(tmp_path / "a", 3)
    write_rl_shards(map(task, range(3, 5)), tmp_path / "b")
    reader = ShardReader([tmp_path / "a", tmp_path / "b"], kind=ShardKind.RL)
    assert [rl_task(*reader[i]).id for i in range(len(reader))] == [f"task-{i}" for i in range(5)]
    with pytest.raises(IndexError):
        reader[5]
    assert reader.digest != ShardReader([tmp_path / "b", tmp_path / "a"], kind=ShardKind.RL).digest


@pytest.mark.parametrize("damage", ["missing", "meta", "kind", "format", "rows"])
def test_unusable_folders_are_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "s"
    if damage != "missing":
        sft_shards(folder, 3)
    if damage == "meta":
        (folder / "shards.json").unlink()
    elif damage in ("format", "rows"):
        meta = json.loads((folder / "shards.json").read_text())
        (folder / "shards.json").write_text(json.dumps({**meta, damage: 7}))
    message = {
        "missing": "no folder of shards",
        "meta": "no folder of shards",
        "kind": "holds sft rows where rl rows are needed",
        "format": "shard format 7, this version reads 1",
        "rows": "holds 3 rows, its shards.json says 7",
    }[damage]
    with pytest.raises(DataError, match=message) as raised:
        ShardReader(folder, kind=ShardKind.RL if damage == "kind" else ShardKind.SFT)
    assert str(folder) in str(raised.value)


def test_sft_rows_come_back(tmp_path: Path) -> None:
    schemas = [{"type": "function", "function": {"name": "crop"}}]
    write_sft_shards([row(5, tools=schemas), row(6, system="")], tmp_path / "s")
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    first, second = sft_row(*reader[0]), sft_row(*reader[1])
    assert first.id == "row-5"
    assert first.tools == tuple(schemas)
    assert [{"from": speaker, "value": text} for speaker, text in first.conversations] == row(5)["conversations"]
    assert first.images == (picture(5),)
    assert second.system is None


def test_tasks_come_back(tmp_path: Path) -> None:
    tasks = [task(i) for i in range(4)]
    assert write_rl_shards(tasks, tmp_path / "s") == 4
    reader = ShardReader(tmp_path / "s", kind=ShardKind.RL)
    assert [rl_task(*reader[i]) for i in range(4)] == tasks


def test_unusable_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="task id 'task-1' comes twice"):
        write_rl_shards([task(1), task(1)], tmp_path / "s")
    broken = Task(id="b", question="?", answer="!", images=(b"no picture",))
    with pytest.raises(DataError, match=r"task 'b'.*cannot be decoded"):
        write_rl_shards([broken], tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_unusable_rows_are_counted_and_named(tmp_path: Path) -> None:
    rows = [row(i) for i in range(48)] + [("web.json[3]", row(48, images=[])), ("web.json[7]", {})]
    report = write_sft_shards(rows, tmp_path / "s", max_dropped=0.04)
    assert report.kept == 48
    assert str(report) == (
        f"{tmp_path / 's'}: 2 of 50 rows dropped: bad_record 1 (web.json[7]); image_count 1 (web.json[3])"
    )
    assert len(ShardReader(tmp_path / "s", kind=ShardKind.SFT)) == 48


def test_too_many_unusable_rows_end_the_job(tmp_path: Path) -> None:
    rows = [row(i) for i in range(48)] + [row(48, images=[]), {}]
    with pytest.raises(DataError, match=r"2 of 50 rows dropped.*row 49.*at most 3\.9% may be"):
        write_sft_shards(rows, tmp_path / "s", max_dropped=0.039)
    with pytest.raises(DataError, match="nothing is left"):
        write_sft_shards([{}], tmp_path / "s", max_dropped=1.0)
    assert list(tmp_path.iterdir()) == []


def test_litdata_is_imported_late() -> None:
    # it takes 500 MB, which no process should pay that reads no shards
    for path in Path(opensearch_lightning.data.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "litdata" for name in names), path
