import ast
import hashlib
import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import opensearch_lightning.data
from opensearch_lightning.data import (
    SearchVLRLDataModule,
    SearchVLSFTDataModule,
    ShardKind,
    ShardReader,
    write_rl_shards,
    write_sft_shards,
    write_shards,
)
from opensearch_lightning.data.rows import rl_task, sft_row
from opensearch_lightning.errors import ConfigurationError, DataError
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("shards.json", []),
        ("shards.json", {"format": 1, "kind": "sft", "rows": 3}),
        ("shards.json", {"format": 1, "kind": "sft", "rows": "3", "digest": "d"}),
        ("shards.json", {"format": 1, "kind": "sft", "rows": 3, "digest": "d", "sources": [["a"]]}),
        ("shards.json", {"format": 1, "kind": "sft", "rows": 3, "digest": "d", "sources": [["a", 4], ["b", -1]]}),
        ("index.json", None),
        ("index.json", {}),
        ("index.json", {"chunks": [{"filename": "../a", "chunk_size": 3, "chunk_bytes": 1}]}),
    ],
)
def test_damaged_folders_are_named(tmp_path: Path, name: str, content: Any) -> None:
    folder = sft_shards(tmp_path / "s", 3)
    (folder / name).write_text("" if content is None else json.dumps(content))
    with pytest.raises(DataError, match=str(folder)) as raised:
        ShardReader(folder, kind=ShardKind.SFT)
    assert name in str(raised.value) or "its sources" in str(raised.value)


@pytest.mark.parametrize("left", [None, 0, -9])
def test_damaged_chunks_are_named_at_the_start(tmp_path: Path, left: int | None) -> None:
    folder = sft_shards(tmp_path / "s", 3)
    chunk = next(folder.glob("*.bin"))
    content = chunk.read_bytes()
    chunk.unlink() if left is None else chunk.write_bytes(content[:left])
    with pytest.raises(DataError, match=f"{chunk.name} is damaged.*the index of its folder says {len(content)}"):
        ShardReader(folder, kind=ShardKind.SFT)


def test_rows_of_a_file_with_another_content_are_named(tmp_path: Path) -> None:
    folder = sft_shards(tmp_path / "s", 3)
    chunk = next(folder.glob("*.bin"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(DataError, match=f"row 1 of {folder} cannot be read"):
        ShardReader(folder, kind=ShardKind.SFT)[1]


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


def wide_picture(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": 3}, "task 3: its id must be a text"),
        ({"id": ""}, "task '': its id must be a text that is not empty"),
        ({"question": None}, "task 'task-1': its question must be a text"),
        ({"question": " "}, "its question must be a text that is not empty"),
        ({"answer": 1932}, "task 'task-1': its answer must be a text .*1932"),
        ({"answer": ""}, "its answer must be"),
        ({"aliases": "Lyon"}, "task 'task-1': aliases are a list of texts, got 'Lyon'"),
        ({"aliases": ("Lyon", 3)}, "its alias must be a text"),
        ({"aliases": ("\ud800",)}, "its alias holds half a surrogate pair"),
        ({"question": "\udfff?"}, "task 'task-1': its question holds half a surrogate pair"),
        ({"metadata": {"x": "\ud800"}}, "row 'task-1' cannot be stored as JSON"),
        ({"metadata": None}, "metadata are a mapping"),
        ({"images": picture()}, "task 'task-1': images are a list"),
        ({"images": None}, "images are a list"),
        ({"images": (picture(), wide_picture(101, 1))}, "task 'task-1', image 2: an image of 101x1 pixels"),
        ({"images": (wide_picture(2, 202),)}, "image 1: an image of 2x202 pixels is more than 100 times"),
    ],
)
def test_tasks_that_would_fail_later_are_refused(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_rl_shards([task(0), replace(task(1), **fields)], tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_long_pictures_up_to_a_limit_are_kept(tmp_path: Path) -> None:
    assert write_rl_shards([replace(task(1), images=(wide_picture(200, 2),))], tmp_path / "s") == 1


@pytest.mark.parametrize("limit", [-0.1, 1.1, float("nan")])
def test_a_limit_that_is_no_fraction_is_refused(tmp_path: Path, limit: float) -> None:
    with pytest.raises(ConfigurationError, match=f"max_dropped .*got {limit}"):
        write_sft_shards([row(0)], tmp_path / "s", max_dropped=limit)
    with pytest.raises(ConfigurationError, match="max_dropped"):
        SearchVLSFTDataModule(tmp_path, None, batch_size=1, max_dropped=limit)
    with pytest.raises(ConfigurationError, match="max_dropped"):
        SearchVLRLDataModule(tmp_path, prompts_per_step=1, max_dropped=limit)


def test_rows_that_could_not_be_stored_are_counted(tmp_path: Path) -> None:
    rows = [row(0), row(1, images=3), row(2, system=3), row(3, system="\ud800"), row(4, tools=[{"x": {1}}])]
    report = write_sft_shards(rows, tmp_path / "s", max_dropped=0.8)
    assert (report.kept, {str(reason): len(names) for reason, names in report.dropped.items()}) == (
        1,
        {"bad_record": 2, "bad_text": 1, "bad_tools": 1},
    )


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
