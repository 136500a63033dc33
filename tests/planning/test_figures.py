"""Figures of the data: the recipe's, those of a folder, those of the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.planning.figures import Assumptions, Figures, read_figures


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
    total = {"rows": 4, "tool_turns": 8, "images": {"number": 6}, "lengths": lengths}
    (tmp_path / "card.json").write_text(json.dumps({"total": total}))
    figures = read_figures(config(tmp_path), {})
    assert (figures.rows, figures.mean_tokens, figures.tool_turns, figures.images_per_row) == (3, 300, 2, 1.5)
    lengths["unit"] = "characters"
    (tmp_path / "card.json").write_text(json.dumps({"total": total}))
    assert read_figures(config(tmp_path), {}).rows == 36_592


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
    (tmp_path / "card.json").write_text('{"total": {"rows": 1}}')
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
