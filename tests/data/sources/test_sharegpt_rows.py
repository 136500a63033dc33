import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from opensearch_lightning.chat import ObservationTurn, UserTurn
from opensearch_lightning.data import DropReason, ImageStore, SFTRow, UnusableRow, parse_sft, read_records
from opensearch_lightning.data.images import load_image
from opensearch_lightning.errors import DataError
from tests.data.rows import answer, call, conversation, picture, row
from tests.models.tiny import tiny_renderer


def parse(record: Any, image_root: Path | None = None) -> SFTRow:
    return parse_sft(record, name="file[0]", images=ImageStore(() if image_root is None else (image_root,)))


def labels(parsed: SFTRow) -> list[str]:
    """What the policy is taught, turn by turn, with the end of its turns."""
    renderer = tiny_renderer()
    sample = renderer.conversation(parsed.system, parsed.turns())
    steps = [sample.token_ids[sample.step_ids == step] for step in range(int(sample.step_ids.max()) + 1)]
    assert all(int(ids[-1]) == renderer.end_of_turn_id for ids in steps)
    return [renderer.decode(ids.tolist()) for ids in steps]


def test_row_is_read_as_it_stands() -> None:
    parsed = parse(row(3, tools=json.dumps([{"type": "function", "function": {"name": "crop"}}])))
    assert parsed.id == "row-3"
    assert [speaker for speaker, _ in parsed.conversations] == ["human", "gpt", "observation", "gpt"]
    assert parsed.images == (picture(3),)
    assert parsed.tools == ({"type": "function", "function": {"name": "crop"}},)


def test_placeholders_become_images_where_they_stand() -> None:
    turns = conversation(
        ("human", "<image>Compare <image>, please."),
        ("gpt", call("x")),
        ("observation", "img_3:<image>"),
        ("gpt", "ok"),
    )
    parsed = parse({"conversations": turns, "images": [picture(1), picture(2), picture(3)]})
    user, _, observed, _ = parsed.turns()
    assert isinstance(user, UserTurn)
    assert user.parts == [picture(1), "Compare ", picture(2), ", please."]
    assert isinstance(observed, ObservationTurn)
    assert observed.parts == ["img_3:", picture(3)]


def test_placeholder_in_assistant_text_is_text() -> None:
    turns = conversation(("human", "<image>Q"), ("gpt", "see ![x](<image>)"))
    parsed = parse({"conversations": turns, "images": [picture()]})
    assert labels(parsed) == ["see ![x](<image>)"]
    assert len(tiny_renderer().conversation(None, parsed.turns()).images) == 1


def test_observations_in_a_row_are_kept_and_masked() -> None:
    turns = conversation(
        ("human", "Q"), ("gpt", call("x")), ("observation", "one"), ("observation", "two"), ("gpt", answer("y"))
    )
    parsed = parse({"conversations": turns})
    assert labels(parsed) == [call("x"), answer("y")]
    text = tiny_renderer().decode(tiny_renderer().conversation(None, parsed.turns()).token_ids.tolist())
    assert "one" in text
    assert "two" in text


def test_labels_are_the_assistant_texts_and_nothing_else() -> None:
    turns = conversation(("human", "Q"), ("gpt", "no thinking here"), ("human", "more"), ("gpt", answer("y")))
    assert labels(parse({"conversations": turns})) == ["no thinking here", answer("y")]


def test_control_strings_from_outside_stay_text() -> None:
    turns = conversation(("human", "<|im_end|><|image_pad|>"), ("gpt", "<|im_end|>ok"))
    parsed = parse({"conversations": turns})
    sample = tiny_renderer().conversation(None, parsed.turns())
    ends = sample.token_ids == tiny_renderer().end_of_turn_id
    assert int(ends.sum()) == 2
    assert not bool((sample.token_ids == tiny_renderer().image_token_id).any())
    assert torch.equal(sample.step_ids[ends], torch.tensor([-1, 0]))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], DropReason.BAD_RECORD),
        ({"messages": []}, DropReason.NO_POLICY_TURN),
        ({"messages": "Q"}, DropReason.BAD_RECORD),
        ({"conversations": [{"from": "human"}]}, DropReason.BAD_RECORD),
        ({"conversations": []}, DropReason.NO_POLICY_TURN),
        ({"conversations": conversation(("human", "Q"))}, DropReason.NO_POLICY_TURN),
        ({"conversations": conversation(("human", "Q"), ("robot", "x"))}, DropReason.UNKNOWN_ROLE),
        ({"conversations": conversation(("gpt", "x"))}, DropReason.TURN_ORDER),
        ({"conversations": conversation(("human", "Q"), ("gpt", "x"), ("gpt", "y"))}, DropReason.TURN_ORDER),
        ({"conversations": conversation(("human", "Q"), ("observation", "x"), ("gpt", "y"))}, DropReason.TURN_ORDER),
        ({"conversations": conversation(("human", "Q"), ("gpt", " \n"))}, DropReason.EMPTY_POLICY_TURN),
        (
            {"conversations": conversation(("human", "Q"), ("gpt", "x"), ("observation", "y"))},
            DropReason.ENDS_WITHOUT_POLICY,
        ),
        (row(0, images=[]), DropReason.IMAGE_COUNT),
        (row(0, images=[picture(), picture()]), DropReason.IMAGE_COUNT),
        (row(0, images=["a.png"]), DropReason.MISSING_IMAGE),
        (row(0, images=[3]), DropReason.MISSING_IMAGE),
        (row(0, images=[picture()[:60]]), DropReason.BROKEN_IMAGE),
        (row(0, images=[b"version https://git-lfs.github.com/spec/v1"]), DropReason.BROKEN_IMAGE),
        (row(0, tools="not json"), DropReason.BAD_TOOLS),
        (row(0, tools='{"name": "crop"}'), DropReason.BAD_TOOLS),
        (row(0, tools="[" * 100_000), DropReason.BAD_TOOLS),
        (row(0, tools=[{"name": {1, 2}}]), DropReason.BAD_TOOLS),
        (row(0, tools=[{"name": float("nan")}]), DropReason.BAD_TOOLS),
        (row(0, tools=[{"name": "\ud800"}]), DropReason.BAD_TOOLS),
        (row(0, images="a.png"), DropReason.BAD_RECORD),
        (row(0, images=3), DropReason.BAD_RECORD),
        (row(0, images={"bytes": picture()}), DropReason.BAD_RECORD),
        (row(0, system=["be brief"]), DropReason.BAD_RECORD),
        (row(0, system="\ud800"), DropReason.BAD_TEXT),
        (row(0, id="\ud800"), DropReason.BAD_TEXT),
        ({"conversations": conversation(("human", "Q"), ("gpt", "\udfff"))}, DropReason.BAD_TEXT),
    ],
)
def test_unusable_rows_say_why(record: Any, reason: DropReason) -> None:
    with pytest.raises(UnusableRow) as raised:
        parse(record)
    assert raised.value.reason is reason


def test_images_are_read_below_their_root_only(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    (root / "in.png").write_bytes(picture(1))
    (tmp_path / "out.png").write_bytes(picture(2))
    assert parse(row(0, images=["in.png"]), image_root=root).images == (picture(1),)
    for path in ("../out.png", str(tmp_path / "out.png"), "missing.png", "in\0.png", "\ud800.png", "a" * 5000):
        with pytest.raises(UnusableRow) as raised:
            parse(row(0, images=[path]), image_root=root)
        assert raised.value.reason is DropReason.MISSING_IMAGE


@pytest.mark.parametrize("mode", ["RGBA", "CMYK"])
def test_pil_images_of_any_mode_are_stored_upright_as_rgb(mode: str) -> None:
    image = Image.new(mode, (4, 2), 0)
    image.getexif()[0x0112] = 6
    with Image.open(io.BytesIO(load_image(image))) as stored:
        assert (stored.mode, stored.size) == ("RGB", (2, 4))
        assert stored.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_files_are_read_with_names(tmp_path: Path, name: str) -> None:
    records = [{"conversations": []}, {"conversations": [1]}]
    lines = "\n\n".join(map(json.dumps, records)) if name.endswith("l") else json.dumps(records)
    (tmp_path / name).write_text(lines)
    assert list(read_records(tmp_path / name)) == [(f"{name}[0]", records[0]), (f"{name}[1]", records[1])]


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("b.json", "{}"), ("c.jsonl", "{\n"), ("d.json", None)])
def test_unreadable_files_are_named(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=name):
        list(read_records(tmp_path / name))
