"""The data card counts what the rows hold."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from opensearch_lightning.data import DropReason, DropReport, SFTRow, ShardKind
from opensearch_lightning.data.sharding.card import corpus_card, quantiles
from opensearch_lightning.data.sharding.card_pages import card_page, lengths_figure
from opensearch_lightning.data.sharding.card_stats import NO_SINGLE_CALL, CorpusStats
from tests.data.rows import answer, call, picture, task


def expert(*turns: tuple[str, str], images: tuple[bytes, ...] = (), system: str | None = None) -> SFTRow:
    return SFTRow(id="x", conversations=turns, images=images, system=system)


@pytest.fixture
def stats() -> CorpusStats:
    counted = CorpusStats()
    long = [("human", "Q" * 5), ("gpt", call("a")), ("observation", "o"), ("observation", "o"), ("gpt", answer("b"))]
    counted.add_row(expert(*long, images=(picture(1), picture(2, 16)), system="S" * 10), 70)
    counted.add_row(expert(("human", "Q"), ("gpt", "no action at all")), -2)
    return counted


def test_rows_are_counted(stats: CorpusStats) -> None:
    report = DropReport("x", limit=1.0)
    for i in range(7):
        report.drop(DropReason.BAD_TEXT, f"f[{i}]")
    card = corpus_card({"web": stats}, report, kind=ShardKind.SFT, max_length=69)
    total = card["total"]
    assert card["sources"] == {"web": total}
    assert (total["rows"], total["turns"], total["policy_turns"], total["tool_turns"]) == (2, 7, 3, 2)
    assert total["tool_turns_per_row"] == 1.0
    assert total["calls"] == {NO_SINGLE_CALL: 1, "text_search": 1}
    assert total["images"]["number"] == 2
    assert total["images"]["bytes"] == len(picture(1)) + len(picture(2, 16))
    assert total["images"]["formats"] == {"PNG": 2}
    assert total["images"]["pixels"]["least"] == 256
    assert total["images"]["pixels"]["most"] == 1024
    assert total["lengths"]["unit"] == "tokens"
    assert total["lengths"]["most"] == 70
    assert total["lengths"]["not_renderable"] == 1
    assert total["lengths"]["longer_than"] == {"69": 1}
    assert card["dropped"] == {"bad_text": {"rows": 7, "first": [f"f[{i}]" for i in range(5)]}}


def test_without_tokens_characters_count() -> None:
    counted = CorpusStats()
    counted.add_row(expert(("human", "né 🗺️"), ("gpt", "b"), system="cd"), None)
    card = corpus_card({"web": counted}, DropReport("x"), kind=ShardKind.SFT, max_length=None)
    assert card["total"]["lengths"]["unit"] == "characters"
    assert card["total"]["lengths"]["most"] == 5 + 1 + 2


def test_counts_add_up(stats: CorpusStats) -> None:
    both = CorpusStats()
    both.merge(stats.to_json())
    both.merge(stats.to_json())
    assert both.rows == 4
    assert both.calls["text_search"] == 2
    assert list(both.tokens) == [70, -2, 70, -2]
    assert list(stats.tokens) == [70, -2]


def test_tasks_have_no_turns() -> None:
    counted = CorpusStats()
    counted.add_task(task(1))
    total = corpus_card({"rl": counted}, DropReport("x"), kind=ShardKind.RL, max_length=None)["total"]
    assert "turns" not in total
    assert (total["rows"], total["images"]["number"], total["lengths"]["most"]) == (1, 1, len(task(1).question))


def test_quantiles_are_values_of_the_list() -> None:
    assert quantiles(range(100, 0, -1)) == {
        "least": 1, "5%": 5, "25%": 25, "median": 50, "75%": 75, "95%": 95, "99%": 99, "most": 100,
    }  # fmt: skip
    assert set(quantiles([7]).values()) == {7}
    assert quantiles([]) == {}


def test_page_holds_the_figures(stats: CorpusStats) -> None:
    report = DropReport("x", limit=1.0)
    report.drop(DropReason.BAD_TEXT, "a|b[1]")
    card = corpus_card({"web": stats, "wiki": stats}, report, kind=ShardKind.SFT, max_length=69)
    page = card_page(card, {"kind": "sft"})
    assert "# Data card: web, wiki" in page
    assert "| all | 4 | 4 |" in page
    assert "| text_search | 2 | 1 | 1 |" in page
    assert "| bad_text | 1 | a\\|b[1] |" in page
    assert "(lengths.svg)" in page


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("lengths", [[], [0], [5], [7, 7, 7], [1, 10_000_000], list(range(1000))])
def test_histogram_counts_every_row(lengths: list[int]) -> None:
    root = ElementTree.fromstring(lengths_figure(lengths, "tokens"))
    bars: list[Any] = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    shown = [int(bar.find(f"{SVG}title").text.rpartition(": ")[2]) for bar in bars]
    assert sum(shown) == max(len(lengths), 1)
    assert len(bars) <= 42
