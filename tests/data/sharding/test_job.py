"""Sources to shards: the same files however they are made, and nothing lost on the way."""

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.data import ShardKind, ShardReader, write_sft_shards
from opensearch_lightning.data.lengths import lengths_file, measure
from opensearch_lightning.data.rows import rl_task, sft_row
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.sharding import ShardJob, shard
from opensearch_lightning.data.sharding.worker import BlockWriter
from opensearch_lightning.data.sources import open_source
from opensearch_lightning.errors import ConfigurationError, DataError
from tests.data.corpora import digests, job, noise, rl_source, sft_source
from tests.models.tiny import tiny_checkpoint, tiny_processor


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_source(tmp_path_factory.mktemp("corpus") / "web")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards made in one go; read only."""
    out = tmp_path_factory.mktemp("whole") / "shards"
    shard(job(corpus, out, processor=tiny_checkpoint()))
    return out


def interrupted(job: ShardJob, monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Run a job that is stopped behind a number of blocks."""
    written = []
    write = BlockWriter.write

    def stopped(self: BlockWriter, block: Any) -> Any:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(block.number)
        return write(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(BlockWriter, "write", stopped)
        with pytest.raises(KeyboardInterrupt):
            shard(job)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the blocks written from now on."""
    numbers: list[int] = []
    write = BlockWriter.write

    def noted(self: BlockWriter, block: Any) -> Any:
        numbers.append(block.number)
        return write(self, block)

    monkeypatch.setattr(BlockWriter, "write", noted)
    return numbers


@pytest.mark.parametrize("workers", [1, 3])
def test_files_do_not_depend_on_the_number_of_processes(
    corpus: Path, whole: Path, tmp_path: Path, workers: int
) -> None:
    shard(job(corpus, tmp_path / "other", workers=workers, processor=tiny_checkpoint()))
    assert len(list(whole.glob("*.bin"))) == 6
    assert digests(tmp_path / "other") == digests(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_rows_stay_in_order_and_images_as_they_are(corpus: Path, whole: Path) -> None:
    reader = ShardReader(whole, kind=ShardKind.SFT)
    records = [json.loads(line) for line in (corpus / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(reader) == len(records) == 23
    for i, record in enumerate(records):
        row = sft_row(*reader[i])
        assert row.id == f"row-{i}"
        assert [{"from": speaker, "value": text} for speaker, text in row.conversations] == record["conversations"]
        assert row.images == tuple((corpus / name).read_bytes() for name in record["images"])


def test_lengths_are_those_that_training_looks_for(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SampleSource(ShardReader(whole, kind=ShardKind.SFT), tiny_processor())
    expected = [len(source.sample(i).token_ids) for i in range(23)]
    assert json.loads(lengths_file(whole, source).read_text()) == expected
    assert len(set(expected)) > 5
    monkeypatch.setattr(SampleSource, "length", None)  # nothing is counted again
    assert measure(source, folder=whole).tolist() == expected


def test_other_ways_to_count_have_files_of_their_own(corpus: Path, tmp_path: Path) -> None:
    settings = {"processor": tiny_checkpoint(), "render_tools": False, "max_pixels": 64 * 64}
    shard(job(corpus, tmp_path / "s", **settings))
    processor = type(tiny_processor()).from_pretrained(tiny_checkpoint())
    processor.image_processor.size["longest_edge"] = 64 * 64
    source = SampleSource(ShardReader(tmp_path / "s", kind=ShardKind.SFT), processor, render_tools=False)
    (kept,) = (tmp_path / "s").glob("lengths-*.json")
    assert kept == lengths_file(tmp_path / "s", source)
    assert json.loads(kept.read_text()) == [len(source.sample(i).token_ids) for i in range(23)]


def test_rows_have_one_digest_however_they_are_written(corpus: Path, whole: Path, tmp_path: Path) -> None:
    write_sft_shards(open_source(corpus).records(), tmp_path / "s", image_root=corpus)
    alone, blocks = (json.loads((folder / "shards.json").read_text()) for folder in (tmp_path / "s", whole))
    assert alone["digest"] == blocks["digest"]


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupted_job_goes_on(
    corpus: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    told: list[int] = []
    half = job(corpus, tmp_path / "s", processor=tiny_checkpoint(), progress=told.append)
    interrupted(half, monkeypatch, after=after)
    assert [path.name for path in tmp_path.iterdir()] == [".s.partial"]
    told.clear()
    report = shard(half)
    assert report is not None and report.kept == 23
    assert told[0] == 4 * after
    assert sum(told) == 23
    assert digests(tmp_path / "s") == digests(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_blocks_half_kept_are_written_again(
    corpus: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    half = job(corpus, tmp_path / "s", processor=tiny_checkpoint())
    interrupted(half, monkeypatch, after=4)
    written.clear()
    rows = tmp_path / ".s.partial" / "rows"
    (rows / "chunk-1-0.bin").unlink()  # its entry is there
    (tmp_path / ".s.partial" / "blocks" / "000002.json").unlink()  # its file is there
    (rows / "chunk-9-0.bin").write_bytes(b"of no block")
    shard(half)
    assert written == [1, 2, 4, 5]
    assert digests(tmp_path / "s") == digests(whole)


def test_work_begun_otherwise_is_not_mixed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(job(corpus, tmp_path / "s"), monkeypatch, after=2)
    with pytest.raises(ConfigurationError, match=r"settings rows_per_block: 4, now 5.*--fresh"):
        shard(job(corpus, tmp_path / "s", rows_per_block=5))
    with pytest.raises(ConfigurationError, match=r"settings processor: nothing, now '\w{32}'"):
        shard(job(corpus, tmp_path / "s", processor=tiny_checkpoint()))
    shard(job(corpus, tmp_path / "s", rows_per_block=5, fresh=True))
    shard(job(corpus, tmp_path / "t", rows_per_block=5))
    assert digests(tmp_path / "s") == digests(tmp_path / "t")


def test_a_source_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = sft_source(tmp_path / "web", 9)
    interrupted(job(corpus, tmp_path / "s"), monkeypatch, after=1)
    shard(job(corpus, tmp_path / "t"))
    before = digests(tmp_path / "t")
    with (corpus / "train.jsonl").open("a") as lines:
        lines.write("{}\n")
    with pytest.raises(
        ConfigurationError, match=r"unfinished work .*sources web records train.jsonl sha256: .*--fresh"
    ):
        shard(job(corpus, tmp_path / "s"))
    with pytest.raises(DataError, match=r"t holds shards that were made otherwise .*train.jsonl.*--fresh"):
        shard(job(corpus, tmp_path / "t"))
    assert digests(tmp_path / "t") == before
    shard(job(corpus, tmp_path / "t", fresh=True, max_dropped=0.1))
    assert digests(tmp_path / "t") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.partial", "t", "web"]


def test_complete_shards_are_left_alone(corpus: Path, whole: Path, written: list[int]) -> None:
    times = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    assert shard(job(corpus, whole, processor=tiny_checkpoint())) is None
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == times
    assert written == []
    assert not (whole.parent / ".shards.partial").exists()


def test_folders_of_others_are_left_alone(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(DataError, match="notes exists already and holds no shards"):
        shard(job(corpus, tmp_path / "notes"))
    write_sft_shards(open_source(corpus).records(), tmp_path / "s", image_root=corpus)
    with pytest.raises(DataError, match="was not made by this command"):
        shard(job(corpus, tmp_path / "s"))


def test_fresh_replaces_shards_alone(tmp_path: Path) -> None:
    corpus = sft_source(tmp_path / "all" / "web", 4)
    before = sorted(corpus.rglob("*"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").write_text("x")
    with pytest.raises(DataError, match="notes exists already and holds no shards"):
        shard(job(corpus, tmp_path / "notes", fresh=True))
    for out in (corpus, tmp_path / "all"):
        (out / "shards.json").write_text("{}")
        with pytest.raises(ConfigurationError, match="of the sources lies in"):
            shard(job(corpus / "train.jsonl", out, fresh=True))
        (out / "shards.json").unlink()
    assert sorted(corpus.rglob("*")) == before
    assert (tmp_path / "notes" / "precious.txt").exists()


@pytest.mark.parametrize("damage", ["gone", "short", "index"])
def test_damaged_shards_are_not_called_complete(tmp_path: Path, damage: str) -> None:
    corpus = sft_source(tmp_path / "web", 4)
    shard(job(corpus, tmp_path / "s"))
    whole = digests(tmp_path / "s")
    chunk = next((tmp_path / "s").glob("*.bin"))
    if damage == "gone":
        chunk.unlink()
    elif damage == "short":
        chunk.write_bytes(chunk.read_bytes()[:-7])
    else:
        (tmp_path / "s" / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"damaged.*--fresh"):
        shard(job(corpus, tmp_path / "s"))
    shard(job(corpus, tmp_path / "s", fresh=True))
    assert digests(tmp_path / "s") == whole


def test_records_nested_too_deep_are_named(tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": ' + deep + "}\n")
    with pytest.raises(DataError, match=r"a.jsonl\[1\] is nested too deep"):
        shard(job(tmp_path / "a.jsonl", tmp_path / "s"))


def test_too_many_unusable_rows_end_the_job(tmp_path: Path, written: list[int]) -> None:
    corpus = sft_source(tmp_path / "web", 9)
    (corpus / "images" / "3_1.png").unlink()
    (corpus / "images" / "7_0.jpg").write_bytes(b"no picture")
    with pytest.raises(
        DataError,
        match=r"2 of 9 rows dropped: broken_image 1 \(train.jsonl\[7\]\); missing_image 1 \(train.jsonl\[3\]\)",
    ):
        shard(job(corpus, tmp_path / "s", max_dropped=0.2))
    assert not (tmp_path / "s").exists()
    written.clear()
    report = shard(job(corpus, tmp_path / "s", max_dropped=0.25))
    assert report is not None and (report.kept, report.n_dropped) == (7, 2)
    assert written == []  # what was finished is kept
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    assert [reader[i][0]["id"] for i in range(7)] == [f"row-{i}" for i in (0, 1, 2, 4, 5, 6, 8)]
    card = json.loads((tmp_path / "s" / "card.json").read_text())
    assert card["dropped"] == {
        "broken_image": {"rows": 1, "first": ["train.jsonl[7]"]},
        "missing_image": {"rows": 1, "first": ["train.jsonl[3]"]},
    }


def test_a_source_without_usable_rows_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(DataError, match="nothing is left"):
        shard(job(tmp_path / "bad.jsonl", tmp_path / "s", max_dropped=1.0))
    assert not (tmp_path / "s").exists()


def test_sources_follow_each_other(corpus: Path, tmp_path: Path) -> None:
    other = sft_source(tmp_path / "b" / "web", 5)
    (tmp_path / "none.jsonl").write_text("{}\n")
    shard(job([corpus, tmp_path / "none.jsonl", other], tmp_path / "s", max_dropped=0.1))
    meta = json.loads((tmp_path / "s" / "shards.json").read_text())
    assert meta["sources"] == [["web", 23], ["web-2", 5]]
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    assert [reader[i][0]["id"] for i in (0, 22, 23, 27)] == ["row-0", "row-22", "row-0", "row-4"]
    with pytest.raises(DataError, match=r"order: \['web', 'none', 'web-2'\], now \['web', 'web-2'\]"):
        shard(job([corpus, other], tmp_path / "s"))
    text = (tmp_path / "s" / "shards.json").read_text()
    assert str(tmp_path) not in text


def test_images_in_zip_files_are_watched(corpus: Path, tmp_path: Path) -> None:
    import shutil

    web = tmp_path / "web"
    web.mkdir()
    shutil.copy(corpus / "train.jsonl", web)
    shutil.make_archive(str(web / "images"), "zip", corpus, "images")
    shard(job(web, tmp_path / "s"))
    assert (ShardReader(tmp_path / "s", kind=ShardKind.SFT))[3][1] == (noise(6), noise(7))
    (web / "images.zip").touch()
    assert shard(job(web, tmp_path / "s")) is None
    shutil.copytree(corpus / "images", tmp_path / "other" / "images")
    (tmp_path / "other" / "images" / "3_0.png").write_bytes(noise(99))
    shutil.make_archive(str(web / "images"), "zip", tmp_path / "other", "images")
    with pytest.raises(DataError, match=r"sources web archives images.zip entries"):
        shard(job(web, tmp_path / "s"))


TASKS: list[dict[str, Any]] = [
    {"id": "x", "question": "Which town?", "answer": "Lyon", "images": ["a.png"]},
    {"id": "y", "question": "Which town?", "answer": "Bern", "images": ["b.png"]},
    {"id": "x-2", "question": "Which river?", "answer": "Aare", "images": ["b.png"]},
    {"id": "z", "question": "Which lake?", "answer": "Thun", "images": ["b.png"]},
    {"id": "x", "question": "Which hill?", "answer": "Gurten", "images": ["b.png"]},
    {"id": "w", "question": "Which town?", "answer": "Lyons", "images": ["c.png"]},
    {"id": "x", "question": "Which street?", "answer": "Aargasse", "images": ["a.png"]},
    {"id": "y", "question": "Which town?", "answer": "Bern", "images": ["b.png"]},
    {"id": "v", "question": "Which tower?", "answer": "Zytglogge", "images": ["a.png"]},
]


def rl_job(source: Path, out: Path, **options: Any) -> ShardJob:
    return job(source, out, kind=ShardKind.RL, max_dropped=0.25, rows_per_block=2, **options)


def test_tasks_come_once_and_by_distinct_ids(tmp_path: Path) -> None:
    source = rl_source(tmp_path / "rl", TASKS)
    report = shard(rl_job(source, tmp_path / "s"))
    assert report is not None
    assert {str(reason): names for reason, names in report.dropped.items()} == {
        "duplicate": ["tasks.jsonl[5]", "tasks.jsonl[7]"]
    }
    reader = ShardReader(tmp_path / "s", kind=ShardKind.RL)
    tasks = [rl_task(*reader[i]) for i in range(len(reader))]
    assert [(task.id, task.answer) for task in tasks] == [
        ("x", "Lyon"), ("y", "Bern"), ("x-2", "Aare"), ("z", "Thun"), ("x-3", "Gurten"), ("x-4", "Aargasse"),
        ("v", "Zytglogge"),
    ]  # fmt: skip
    assert tasks[0].images == (noise(1),)
    assert json.loads((tmp_path / "s" / "card.json").read_text())["total"]["rows"] == 7


@pytest.mark.parametrize("after", [3, 5, 6, 7])
def test_tasks_are_the_same_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    # five blocks, of which the third and the fourth are written again for what repeats in them
    source = rl_source(tmp_path / "rl", TASKS)
    shard(rl_job(source, tmp_path / "s"))
    if after < 7:
        interrupted(rl_job(source, tmp_path / "t"), monkeypatch, after=after)
    shard(rl_job(source, tmp_path / "t"))
    assert digests(tmp_path / "s") == digests(tmp_path / "t")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may not grow beyond 4 KB: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said(corpus: Path, tmp_path: Path, small_files: None) -> None:
    with pytest.raises(DataError, match=r"s cannot be written: File too large. What is finished is kept"):
        shard(job(corpus, tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_one_job_at_a_time(corpus: Path, tmp_path: Path) -> None:
    def second(rows: int) -> None:
        with pytest.raises(ConfigurationError, match="another process writes"):
            shard(replace(first, progress=lambda rows: None))

    first = job(corpus, tmp_path / "s", progress=second)
    shard(first)
    assert len(ShardReader(tmp_path / "s", kind=ShardKind.SFT)) == 23


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_block": 0}, "rows_per_block is 0"),
        ({"max_length": -1}, "max_length is -1"),
        ({"max_pixels": 100}, "give the processor too"),
        ({"kind": ShardKind.RL, "processor": Path("p")}, "of SFT rows only"),
        ({"workers": -1}, "workers is -1"),
        ({"max_dropped": 2.0}, "max_dropped"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    corpus: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        job(corpus, tmp_path / "s", **options)


def test_a_source_that_grows_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = sft_source(tmp_path / "web", 9)
    records = corpus / "train.jsonl"
    write = BlockWriter.write

    def growing(self: BlockWriter, block: Any) -> Any:
        with records.open("a") as file:
            file.write(records.read_text().splitlines()[0] + "\n")
        return write(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(BlockWriter, "write", growing)
        with pytest.raises(DataError, match=r"train.jsonl changed while it was read.*--fresh"):
            shard(job(corpus, tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    lines = len(records.read_text().splitlines())
    report = shard(job(corpus, tmp_path / "s", fresh=True))
    assert report is not None and report.kept == lines
