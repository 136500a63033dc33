"""The report in a real browser: no error, no request, nothing hostile becomes markup, keys and pointer work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opensearch_lightning.dashboards import write_report
from tests.dashboards.browser import CHROMIUM, Page
from tests.dashboards.sample_runs import HOSTILE, make_grpo_run, make_hostile_run, make_sft_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

SHOWN = HOSTILE.replace("\u2028", "⟨U+2028⟩").replace("\u202e", "⟨U+202E⟩")
"""The hostile text as a reader sees it: characters that would break a line or turn it around are spelled out."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return write_report([make_sft_run(root / "sft"), make_grpo_run(root / "grpo")], root / "report.html")


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with Page(report) as opened:
        yield opened


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "page" in request.fixturenames:
        assert request.getfixturevalue("page").console == []


def test_it_draws_everything_and_asks_for_nothing(page: Page, report: Path) -> None:
    assert page.text("#main > section > h2") == [
        "Held-out results", "Before and after", "Curves: sft", "Curves: grpo", "Tools: grpo",
    ]  # fmt: skip
    drawn = page.run("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('polyline'))")
    assert drawn
    outside = [url for url in page.requests if not url.startswith(("data:image/", "data:,", report.resolve().as_uri()))]
    assert outside == []


def test_results_show_accuracy_error_number_and_the_change(page: Page) -> None:
    cells = page.text("#results tbody tr:nth-child(3) td")
    assert cells[0] == "74.6% ± 2.8n = 240fatal 0.8%"
    assert page.text("#results .change")[0] == "+32.5± 4.2 points, after SFT → after GRPO"


def test_tools_show_calls_errors_and_latency(page: Page) -> None:
    row = page.text("#tools-1 tbody tr:first-child > *")
    assert (
        row[0] == "crop" and row[2].endswith("%)") and row[3].startswith("malformed_call ") and row[5].endswith(" ms")
    )


def test_the_pointer_reads_values(page: Page) -> None:
    page.hover("#curves-1 .plot svg", across=0.9)
    (tip,) = page.text("#curves-1 .tip:not([hidden])")
    assert tip.startswith("Step 5") and "held-out, greedy" in tip and "%" in tip


def test_arrow_keys_read_values_and_smoothing_adds_the_mean(page: Page) -> None:
    page.choose("Smoothing", "5")
    page.run("document.querySelector('#curves-1 .plot svg').focus()")
    page.press("End")
    page.press("ArrowLeft")
    (tip,) = page.text("#curves-1 .tip:not([hidden])")
    assert tip.startswith("Step 58") and "mean " in tip
    page.press("Escape")
    assert page.text("#curves-1 .tip:not([hidden])") == []
    page.choose("Smoothing", "1")


def test_the_legend_hides_a_series(page: Page) -> None:
    page.run("document.querySelector('#curves-1 .legend button').click()")
    assert page.run("document.querySelectorAll('#curves-1 .plot')[0].querySelectorAll('polyline').length") == 2
    page.run("document.querySelector('#curves-1 .legend button').click()")


def test_values_open_as_a_table(page: Page) -> None:
    page.run("document.querySelector('#curves-1 summary').click()")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("document.querySelectorAll('#curves-1 figure:first-child tbody tr').length") == 60
    assert page.text("#curves-1 figure:first-child thead th")[:2] == ["step", "training"]


def test_the_newest_training_step_is_open_and_outcomes_can_be_chosen(page: Page) -> None:
    assert page.run("document.querySelectorAll('.list button').length") == 16
    page.choose("Outcome", "fatal")
    assert set(page.text(".list .chip")) == {"fatal"}
    assert page.run("document.activeElement.tagName") == "SELECT", "the focus stays"
    assert page.text(".step.masked h4") == ["Step 1: text_search", "Step 2: text_search", "Step 3: crop"]
    assert "clamped from −0.4" in page.text(".detail .facts")[0]
    assert page.text(".step:nth-child(2) .chip") == ["timeout", "injected", "masked: no gradient"]
    page.choose("Outcome", "")


def test_keys_move_through_the_list(page: Page) -> None:
    page.choose("Outcome", "right")
    first = page.text(".detail .chips")
    page.run("document.querySelector('.list button').focus()")
    page.press("ArrowDown")
    assert page.run("document.activeElement === document.querySelector('.list button:nth-child(2)')")
    assert page.run("document.activeElement.getAttribute('aria-current')") == "true"
    assert page.text(".detail .chips") != first
    page.choose("Outcome", "")


def test_calls_are_json_pictures_are_shown_and_tokens_are_shaded_by_mask(page: Page) -> None:
    page.choose("Outcome", "right")
    assert page.text(".step:first-child pre[aria-label=Call]") == [
        'crop({\n  "image": "img_1",\n  "x": 12,\n  "y": 8,\n  "width": 64,\n  "height": 64\n})'
    ]
    assert page.run("[...document.querySelectorAll('.detail img')].map((image) => image.naturalWidth)") == [160, 64]
    kept = page.run("getComputedStyle(document.querySelector('.tokens .kept .tok')).backgroundColor")
    page.choose("Outcome", "fatal")
    masked = page.run("getComputedStyle(document.querySelector('.tokens .masked .tok')).backgroundColor")
    assert len({kept, masked, "rgba(0, 0, 0, 0)"}) == 3
    assert "".join(page.text(".tokens .kept")).startswith("<think>\nStep 0: I should use layout_parsing")
    page.choose("Outcome", "")


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False), (320, True)])
def test_nothing_sticks_out_at_any_width(report: Path, width: int, dark: bool) -> None:
    with Page(report, width=width, dark=dark) as small:
        assert small.run("document.documentElement.scrollWidth") <= width
        background = small.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 19, 22)") is dark
        assert small.console == []


def test_hostile_texts_are_shown_as_text(tmp_path: Path) -> None:
    path = write_report([make_hostile_run(tmp_path / "run")], tmp_path / "report.html")
    with Page(path, width=390) as hostile:
        assert hostile.run("document.title") == "Training report"
        assert hostile.run("document.querySelectorAll('[onerror], main script, img[src=x]').length") == 0
        assert hostile.text(".question-text") == [SHOWN]
        assert hostile.text(".answer") == [SHOWN]
        assert SHOWN in hostile.text(".detail pre[aria-label=Observation]")
        assert hostile.text("#results tbody th") == [SHOWN]
        assert hostile.text("#tools-0 tbody th") == [SHOWN]
        assert SHOWN in "".join(hostile.text(".tokens"))
        assert hostile.run("document.documentElement.scrollWidth") <= 390
        assert hostile.console == []


def test_an_empty_report_says_what_is_missing(tmp_path: Path) -> None:
    with Page(write_report([tmp_path], tmp_path / "report.html")) as empty:
        assert any("metrics.csv" in note for note in empty.text(".notes li"))
        assert empty.console == []
