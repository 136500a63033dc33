import base64
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opensearch_lightning.data import (
    DropReason,
    ImageStore,
    UnusableRow,
    open_source,
    parse_rl,
    read_records,
    write_rl_shards,
)
from opensearch_lightning.data.rows import rl_task
from opensearch_lightning.data.shards import ShardKind, ShardReader
from opensearch_lightning.types import Task
from tests.data.rows import picture

SAMPLE = Path(os.environ.get("OPENSEARCH_SAMPLES", Path(__file__).parents[4] / "shared" / "data")) / (
    "infoseek-rl-sample.parquet"
)
STORE = ImageStore()
REPORT = "## Report\n\n" + "The tower was found on the map. " * 10 + "\n\nThe answer is \\boxed{\\text{Lyon}}."


def parse(record: Any, name: str = "rl_data.jsonl[0]") -> Task:
    return parse_rl(record, name=name, images=STORE)


def refusal(record: Any) -> tuple[DropReason, str]:
    with pytest.raises(UnusableRow) as raised:
        parse(record)
    return raised.value.reason, str(raised.value)


def released(**fields: Any) -> dict[str, Any]:
    return {"question": "Which town?", "answer": REPORT, "images": [picture(1)], "dataset": "wiki_en", **fields}


def test_a_released_row_gives_its_short_answer_and_keeps_the_report() -> None:
    task = parse(released(extra=[1], level=2, weight=float("nan")))
    assert (task.question, task.answer, task.aliases, task.images) == ("Which town?", "Lyon", (), (picture(1),))
    assert task.metadata == {"dataset": "wiki_en", "level": 2, "report": REPORT}


def test_a_row_as_verl_reads_it() -> None:
    task = parse(
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>\nWhich town?"}],
            "images": [{"bytes": picture(2), "path": None}],
            "reward_model": {"ground_truth": "Lyon", "candidate_answers": '["Lyon", " Lugdunum ", ""]'},
            "data_source": "fvqa",
            "data_id": "fvqa_train_67",
            "image_urls": None,
        }
    )
    assert task == Task(
        id="fvqa_train_67",
        question="Which town?",
        answer="Lyon",
        aliases=("Lugdunum",),
        images=(picture(2),),
        metadata={"data_source": "fvqa", "data_id": "fvqa_train_67"},
    )


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not there")
def test_real_rows_of_the_field(tmp_path: Path) -> None:
    source = open_source(SAMPLE)
    tasks = [parse_rl(record, name=name, images=source.images) for name, record in source.records()]
    assert len({task.id for task in tasks}) == len(tasks) == 5
    assert tasks[0].question == "What is the country of origin of this food?"
    assert tasks[0].answer == "Spain"
    assert tasks[0].aliases == ("Kingdom of Spain", "ESP", "🇪🇸", "ES")
    assert all(task.images[0].startswith(b"\xff\xd8\xff") and len(task.images) == 1 for task in tasks)
    assert {task.metadata["data_source"] for task in tasks} == {"mmsearch_r1/infoseek_train_split"}
    write_rl_shards(tasks, tmp_path / "shards")
    assert [rl_task(*stored) for stored in ShardReader(tmp_path / "shards", kind=ShardKind.RL)] == tasks


@pytest.mark.parametrize(
    ("fields", "answer", "aliases"),
    [
        ({"answer": "Lyon, France."}, "Lyon, France.", ()),
        ({"answer": ["Lyon", "Lugdunum"]}, "Lyon", ("Lugdunum",)),
        ({"answer": '["Lyon", "Lugdunum"]'}, "Lyon", ("Lugdunum",)),
        ({"answer": "[1, 2]"}, "[1, 2]", ()),
        ({"answer": "b", "aliases": '["B", 3]'}, "b", ("B", "3")),
        ({"answer": "b", "aliases": '["B", null]'}, "b", ('["B", null]',)),
        ({"answer": 1889}, "1889", ()),
        ({"answer": None, "answers": ["Lyon"], "aliases": ["Lyon", "L."]}, "Lyon", ("L.",)),
        ({"answer": None, "gt_answer": "Lyon", "alternative_gt_answers": ["L."]}, "Lyon", ("L.",)),
        ({"ground_truth": "Lyon", "candidate_answers": "Lugdunum"}, "Lyon", ("Lugdunum",)),
        ({"reward_model": {"ground_truth": ["Lyon", "L."]}}, "Lyon", ("L.",)),
    ],
)
def test_answers_of_each_form(fields: dict[str, Any], answer: str, aliases: tuple[str, ...]) -> None:
    task = parse(released(**fields))
    assert (task.answer, task.aliases) == (answer, aliases)


@pytest.mark.parametrize(
    "fields",
    [
        {"images": None, "image": picture(1)},
        {"images": {"bytes": picture(1), "path": None}},
        {"images": list(picture(1))},
        {"images": None, "image": base64.b64encode(picture(1)).decode()},
        {"images": [], "image_urls": ["data:image/png;base64," + base64.b64encode(picture(1)).decode()]},
        {
            "question": [{"role": "user", "content": [{"type": "image", "image": picture(1)}, "Which town?"]}],
            "images": None,
        },
    ],
)
def test_images_of_each_form(fields: dict[str, Any]) -> None:
    task = parse(released(**fields))
    assert (task.images, task.question) == ((picture(1),), "Which town?")


def test_placeholders_are_taken_out_and_parts_choose_their_image() -> None:
    two = [picture(1), picture(2)]
    assert parse(released(question="<image>\nCompare <image>, please.", images=two)).question == "Compare , please."
    parts = [{"type": "image", "index": 1}, {"type": "text", "text": "Which?"}, {"type": "image", "index": 0}]
    task = parse(released(question=None, prompt=[{"role": "user", "content": parts}], images=two))
    assert (task.question, task.images) == ("Which?", (picture(2), picture(1)))


def test_paths_are_found_where_the_images_are(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(picture(9))
    (tmp_path / "rl_data.jsonl").write_text('{"question": "Q", "answer": "A", "images": ["rl/images/1.png"]}\n')
    source = open_source(tmp_path)
    ((name, record),) = source.records()
    assert parse_rl(record, name=name, images=source.images).images == (picture(9),)


def test_repeated_questions_have_distinct_ids() -> None:
    first = parse(released())
    assert first.id.startswith("rl_data-")
    assert parse(released(), name="rl_data.jsonl[7]").id == first.id
    others = [parse(released(images=[picture(2)])), parse(released(question="Which river?")), parse(released(id="x"))]
    others.append(parse(released(answer="Paris")))
    assert len({task.id for task in [first, *others]}) == 5


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ("x", DropReason.BAD_RECORD, "an object"),
        (released(question=None), DropReason.NO_QUESTION, "name its column"),
        (released(question="<image>"), DropReason.NO_QUESTION, "empty"),
        (released(question=3), DropReason.BAD_RECORD, "a text"),
        (released(question=[{"role": "system", "content": "x"}]), DropReason.NO_QUESTION, "one user message"),
        (released(question=[{"role": "user", "content": "x"}] * 2), DropReason.NO_QUESTION, "one user message"),
        (released(question="\ud800"), DropReason.BAD_TEXT, "question"),
        (released(answer=None), DropReason.NO_ANSWER, "name its column"),
        (released(answer=[]), DropReason.NO_ANSWER, ""),
        (released(answer=True), DropReason.NO_ANSWER, ""),
        (released(answer="\udfff"), DropReason.BAD_TEXT, "answer"),
        (released(answer=REPORT.replace("\\boxed", "")), DropReason.NO_SHORT_ANSWER, "report of 3.. characters"),
        (released(question="<image><image> Q"), DropReason.IMAGE_COUNT, "2 placeholders for 1 images"),
        (released(question="<image> Q", images=[]), DropReason.IMAGE_COUNT, "1 placeholders for 0 images"),
        (released(images=None, image_id="oven_1"), DropReason.MISSING_IMAGE, "'image_id'"),
        (released(images=["a.png"]), DropReason.MISSING_IMAGE, "a path"),
        (released(images=[picture()[:50]]), DropReason.BROKEN_IMAGE, "decoded"),
    ],
)
def test_unusable_rows_say_why(record: Any, reason: DropReason, message: str) -> None:
    found, said = refusal(record)
    assert found is reason
    assert re.search(message, said), said


def test_images_that_no_processor_takes_are_refused() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (303, 3)).save(buffer, format="PNG")
    assert refusal(released(images=[buffer.getvalue()]))[0] is DropReason.BROKEN_IMAGE


def test_names_of_records_come_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.b.jsonl").write_text('{"question": "Q", "answer": "A"}\n')
    ((name, record),) = read_records(tmp_path / "a.b.jsonl")
    assert parse(record, name=name).id.startswith("a-")
