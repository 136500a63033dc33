import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opensearch_lightning.data import DropReason, DropReport, UnusableRow, open_source, parse_sft
from opensearch_lightning.errors import DataError
from tests.data.rows import conversation, picture, row

SUBSETS = {"fvqa": "clean", "wiki_en": "filtered"}


def release(root: Path) -> Path:
    """Two subsets as released: nested archives, paths without the prefix, a row that ends on an observation."""
    for number, (subset, kind) in enumerate(SUBSETS.items()):
        (root / subset).mkdir(parents=True)
        rows = [row(i, id=None, images=[f"images/{i}.png"], tools='[{"name": "crop"}]') for i in range(4)]
        rows[2]["conversations"] = conversation(("human", "<image>Q"), ("gpt", "x"), ("observation", "y"))
        (root / subset / f"{subset}_llama_factory_{kind}.json").write_text(json.dumps(rows))
        (root / subset / "dataset_info.json").write_text("{}")
        with zipfile.ZipFile(root / subset / "images.zip", "w") as archive:
            for i in range(4):
                archive.writestr(f"{'images/' * (1 + number)}{i}.png", picture(10 * number + i))
    return root


def test_a_subset_of_the_release_is_a_source(tmp_path: Path) -> None:
    release(tmp_path)
    for number, (subset, kind) in enumerate(SUBSETS.items()):
        source = pickle.loads(pickle.dumps(open_source(tmp_path / subset)))
        report = DropReport(source.name, limit=0.5)
        rows = []
        for name, record in source.records():
            try:
                rows.append(parse_sft(record, name=name, images=source.images))
            except UnusableRow as error:
                report.drop(error.reason, name)
        file = f"{subset}_llama_factory_{kind}.json"
        assert source.name == subset
        assert [parsed.id for parsed in rows] == [f"{file}[{i}]" for i in (0, 1, 3)]
        assert [parsed.images for parsed in rows] == [(picture(10 * number + i),) for i in (0, 1, 3)]
        assert dict(report.dropped) == {DropReason.ENDS_WITHOUT_POLICY: [f"{file}[2]"]}


def test_the_whole_release_is_refused_with_its_subsets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"each of them as a source of its own: {tmp_path}/fvqa, {tmp_path}/wiki_en"):
        open_source(release(tmp_path))


def test_images_may_stand_elsewhere(tmp_path: Path) -> None:
    release(tmp_path)
    file = tmp_path / "fvqa" / "fvqa_llama_factory_clean.json"
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "fvqa" / "images.zip").rename(moved / "all.zip")
    ((name, record), *_) = open_source(file).records()
    for images in (moved, moved / "all.zip"):
        source = open_source(file, images=images)
        assert parse_sft(record, name=name, images=source.images).images == (picture(0),)
    with pytest.raises(UnusableRow, match=r"image 'images/0.png' is not in .*fvqa"):
        parse_sft(record, name=name, images=open_source(file).images)


def test_files_of_a_folder_and_of_the_hub_are_joined_in_order(tmp_path: Path) -> None:
    for number in (1, 0):
        (tmp_path / "data").mkdir(exist_ok=True)
        table = pa.Table.from_pylist([{"n": 2 * number}, {"n": 2 * number + 1}])
        pq.write_table(table, tmp_path / "data" / f"train-0000{number}-of-00002.parquet")
    (tmp_path / "README.md").write_text("x")
    source = open_source(tmp_path)
    assert [record["n"] for _, record in source.records()] == [0, 1, 2, 3]
    assert [name for name, _ in source.records()][2] == "train-00001-of-00002.parquet[0]"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no file of records"),
        ({"README.md": "x"}, "holds no file of records"),
        (
            {"train.jsonl": "", "test-1.jsonl": ""},
            "several splits .test, train.; give the files to use: .*test-1",
        ),
        (
            {"a_llama_factory_clean.json": "", "a_llama_factory_filtered.json": ""},
            "several versions .* give one of them",
        ),
        ({"shards.json": "{}", "index.json": "{}"}, "holds shards already"),
        ({"a.json": "version https://git-lfs.github.com/spec/v1\n"}, "a.json is a pointer of Git LFS"),
        ({"a.json": "[]", "images.zip": "version https://git-lfs.github.com/spec/v1\n"}, "images.zip is a pointer"),
    ],
)
def test_folders_that_are_no_source_say_what_to_give(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(("name", "message"), [("nowhere", "does not exist"), ("a.txt", "no file of records; give")])
def test_paths_that_are_no_source_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=f"{name} .*{message}|{name} {message}"):
        open_source(tmp_path / name)


def test_the_fingerprint_tells_other_content(tmp_path: Path) -> None:
    release(tmp_path)
    folder = tmp_path / "fvqa"
    seen = [open_source(folder).fingerprint()]
    assert json.loads(json.dumps(seen[0])) == open_source(folder).fingerprint()
    assert [entry["name"] for part in ("records", "archives") for entry in seen[0][part]] == [
        "fvqa_llama_factory_clean.json",
        "images.zip",
    ]
    records = folder / "fvqa_llama_factory_clean.json"
    records.write_text(records.read_text().replace("town 1", "town 9"))
    seen.append(open_source(folder).fingerprint())
    with zipfile.ZipFile(folder / "images.zip", "a") as archive:
        archive.writestr("more.png", picture())
    seen.append(open_source(folder).fingerprint())
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_urls_are_refused_unless_allowed(tmp_path: Path) -> None:
    record: dict[str, Any] = row(0, images=["http://127.0.0.1:9/a.png"])
    (tmp_path / "a.jsonl").write_text("")
    for allow, reason in ((False, DropReason.REMOTE_IMAGE), (True, DropReason.MISSING_IMAGE)):
        with pytest.raises(UnusableRow) as raised:
            parse_sft(record, name="", images=open_source(tmp_path / "a.jsonl", allow_urls=allow).images)
        assert raised.value.reason is reason
