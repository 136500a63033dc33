"""Figures of the data: the recipe's, those of a folder, those of the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.cli import main
from opensearch_lightning.composition import compose_config
from opensearch_lightning.data import ShardKind, ShardReader
from opensearch_lightning.data.lengths import measure
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.planning.figures import Assumptions, Figures, read_figures
from tests.data.corpora import sft_source
from tests.models.tiny import tiny_checkpoint, tiny_processor


def config(folder: Path | None = None, **data: Any) -> dict[str, Any]:
    return {"data": {"shards": str(folder), "max_length": 1000, **data}, "model": {"processor": {}}}


def test_the_recipe_where_no_data_are() -> None:
    figures = read_figures(config(Path("nowhere")), {})
    assert (figures.rows, figures.tool_turns, figures.image_pixels) == (36_592, 6.3, 262_144)
    # 4,500 + 6.3 · (250 + 800) + 400, and of them 6.3 · 250 + 400, rounded
    assert figures.mean_tokens == pytest.approx(4500 + 6.3 * 1050 + 400, rel=0.01)
    assert figures.sampled_tokens == pytest.approx(6.3 * 250 + 400, rel=0.02)


def test_measured_lengths_count(tmp_path: Path) -> None:
    # one row cannot be rendered, one is too long
    (tmp_path / "lengths-abc.json").write_text("[100, 300, -1, 5000]")
    figures = read_figures(config(tmp_path), {})
    assert (figures.rows, figures.mean_tokens, list(figures.row_lengths())) == (2, 200, [100, 300])
    assert figures.sampled_tokens == pytest.approx(200 * 2000 / 11_500)
    assert "measured" in figures.origin


def test_rows_that_are_cut_count_as_long_as_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "lengths-abc.json").write_text("[100, 300, -1, 5000]")
    figures = read_figures(config(tmp_path, too_long="cut"), {})
    assert list(figures.row_lengths()) == [100, 300, 1000]


def test_lengths_of_other_rows_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    folders = [tmp_path / "a", tmp_path / "b"]
    for rows, folder in enumerate(folders, start=2):
        folder.mkdir()
        (folder / "shards.json").write_text(json.dumps({"rows": rows}))
        (kept / f"lengths-{rows}.json").write_text(json.dumps([10 * rows] * rows))
    (folders[0] / "lengths-old.json").write_text("[1]")
    both = config(shards=[str(folder) for folder in folders], lengths_dir=str(kept))
    assert list(read_figures(both, {}).row_lengths()) == [20, 20, 30, 30, 30]
    (folders[1] / "shards.json").write_text("{")
    with pytest.raises(DataError, match=r"shards\.json.*write the shards again"):
        read_figures(both, {})


def test_rows_that_are_left_out_are_told(tmp_path: Path) -> None:
    (tmp_path / "lengths-abc.json").write_text("[100, 300, -1, 5000]")
    told = read_figures(config(tmp_path, max_dropped=0.5), {}).origin
    assert told.endswith("; 2 of 4 rows are left out: longer than max_length=1000, or unusable")
    refused = read_figures(config(tmp_path, max_dropped=0.01), {}).origin
    assert refused == f"{told}. Training ends at once, as data.max_dropped=0.01 accepts fewer"
    cut = read_figures(config(tmp_path, max_dropped=0.25, too_long="cut"), {})
    assert (list(cut.row_lengths()), cut.rows) == ([100, 300, 1000], 3)
    assert "1 of 4 rows are left out" in cut.origin
    assert read_figures(config(tmp_path, max_length=6000, too_long="cut"), {}).rows == 3


def test_the_newest_lengths_of_each_of_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "lengths-new.json").write_text(json.dumps([100 * (number + 1)] * 2))
    assert read_figures(config(shards=[str(folder) for folder in folders]), {}).rows == 4
    (folders[1] / "lengths-new.json").unlink()
    # a part of the data says nothing of all of them
    assert read_figures(config(shards=[str(folder) for folder in folders]), {}).rows == 36_592


def test_a_card_counts(tmp_path: Path) -> None:
    lengths = {"unit": "tokens", "sum": 900, "not_renderable": 1}
    images = {"number": 6, "pixels": {"median": 40_000}}
    card: dict[str, Any] = {"kind": "sft", "total": {"rows": 4, "tool_turns": 8, "images": images, "lengths": lengths}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    figures = read_figures(config(tmp_path), {})
    assert (figures.rows, figures.mean_tokens, figures.tool_turns, figures.images_per_row) == (3, 300, 2, 1.5)
    assert figures.image_pixels == 40_000
    limited = read_figures({**config(tmp_path), "model": {"processor": {"max_pixels": 9_000}}}, {})
    assert limited.image_pixels == 9_000
    card |= {"kind": "rl"}
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert read_figures(config(tmp_path), {}).rows == 36_592


def test_a_card_that_counts_characters_leaves_tokens_to_be_assumed(tmp_path: Path) -> None:
    lengths = {"unit": "characters", "sum": 900}
    total = {"rows": 4, "tool_turns": 8, "images": {"number": 0, "pixels": {}}, "lengths": lengths}
    (tmp_path / "card.json").write_text(json.dumps({"kind": "sft", "total": total}))
    figures = read_figures(config(tmp_path), {})
    assert (figures.rows, figures.mean_tokens, figures.tool_turns, figures.images_per_row) == (4, 11_500, 2, 0)
    assert figures.origin.endswith("which counts no tokens: those are assumed")
    # measured later, as `opensearch measure` does
    (tmp_path / "lengths-abc.json").write_text("[100, 200, 300, 400]")
    figures = read_figures(config(tmp_path), {})
    assert (figures.rows, figures.mean_tokens, figures.tool_turns, figures.images_per_row) == (4, 250, 2, 0)


def test_a_folder_that_was_sharded_counts_as_it_is(tmp_path: Path) -> None:
    corpus = sft_source(tmp_path / "web", 9)
    command = ["shard", str(corpus), str(tmp_path / "s"), "--workers", "0", "--processor", str(tiny_checkpoint())]
    assert main(command) == 0
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    expected = measure(SampleSource(reader, tiny_processor())).tolist()
    composed = compose_config(["experiment=sft_8b", f"data.shards={tmp_path / 's'}"])
    figures = read_figures(composed, {})
    assert figures.lengths == expected
    assert (figures.rows, figures.tool_turns, figures.images_per_row) == (9, 1, 2)
    # pictures of 24 × 24 and a little more, far below Table 4's limit
    assert 576 <= figures.image_pixels <= 720


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    (tmp_path / "lengths-abc.json").write_text("[100, 300]")
    figures = read_figures(config(tmp_path), {"mean_tokens": 5750.0, "rows": None})
    assert (figures.mean_tokens, figures.lengths, figures.sampled_tokens) == (5750, None, 1000)
    limited = read_figures({**config(tmp_path), "model": {"processor": {"max_pixels": 65_536}}}, {})
    assert limited.image_pixels == 65_536


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '["x"]'])
def test_lengths_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths-abc.json").write_text(content)
    with pytest.raises(DataError, match=r"lengths-abc\.json.*remove it"):
        read_figures(config(tmp_path), {})


def test_a_card_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"kind": "sft", "total": {"rows": 1}}')
    with pytest.raises(DataError, match=r"card\.json is no card"):
        read_figures(config(tmp_path), {})


@pytest.mark.parametrize("values", [{"rows": 0}, {"mean_tokens": -1.0}, {"images_per_row": float("nan")}])
def test_figures_that_cannot_be(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigurationError, match=name):
        Figures(**values)


def test_more_sampled_than_there_are() -> None:
    with pytest.raises(ConfigurationError, match="cannot hold 2,000 sampled"):
        Figures(mean_tokens=1000)


@pytest.mark.parametrize("values", [{"mfu": 0.0}, {"network": 1.5}, {"max_sequences": 0}])
def test_assumptions_that_cannot_be(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigurationError, match=name):
        Assumptions(**values)
