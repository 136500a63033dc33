"""Pages with columns, figures and tables, read by the real models; and what is done with regions and lines."""

import builtins
import logging
import threading

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import ToolExecutor, local_layout_parsing
from opensearch_lightning.tools.html_tables import html_table
from opensearch_lightning.tools.layout import Block, Layout, layout_output
from opensearch_lightning.tools.ocr import layout_blocks
from opensearch_lightning.tools.region_layout import Region, RegionLayoutReader, region_blocks
from opensearch_lightning.tools.text_lines import Line
from tests.tools.fakes import KEY, book, call
from tests.tools.pictures import sign

LEFT = ["Old town was built of stone", "over many years by people", "of the valley and harbour"]
HISTORY = ["Winter floods made crossing", "hard until the council built", "a new road for trade ships"]
RIGHT = ["Market days drew crowds to", "the bridge from all villages", "around, and toll was paid"]
ROWS = [("Bridge", "Built", "Length"), ("Kestrel", "1712", "120 m"), ("Torvik", "1804", "88 m")]
HTML = (
    "<table><tr><td>Bridge</td><td>Built</td><td>Length</td></tr>"
    "<tr><td>Kestrel</td><td>1712</td><td>120 m</td></tr>"
    "<tr><td>Torvik</td><td>1804</td><td>88 m</td></tr></table>"
)


def draw_page():
    """A title over two columns, a figure with a caption in the right one, a table and a page number below both."""
    page = Image.new("RGB", (800, 1000), "white")
    pen = ImageDraw.Draw(page)

    def write(x, y, lines, size=22, anchor="la"):
        for number, text in enumerate(lines):
            pen.text((x, y + 30 * number), text, font=ImageFont.load_default(size), fill="black", anchor=anchor)

    write(400, 70, ["The Bridges of Lindal"], 44, "mm")
    write(50, 140, LEFT)
    write(50, 270, ["1 History"], 30)
    write(50, 330, HISTORY)
    write(430, 140, RIGHT)
    noise = np.random.default_rng(0).integers(0, 255, (18, 32, 3)).astype(np.uint8)
    page.paste(Image.fromarray(noise).resize((320, 160), Image.Resampling.BICUBIC), (430, 260))
    write(590, 445, ["Figure 1. The north gate in winter"], 18, "mm")
    write(400, 560, ["Table 1. Bridges and their lengths"], 18, "mm")
    for i, row in enumerate(ROWS):
        for j, cell in enumerate(row):
            x, y = 50 + 233 * j, 580 + 44 * i
            pen.rectangle((x, y, x + 233, y + 44), outline="black", width=2)
            write(x + 12, y + 10, [cell])
    write(400, 970, ["Page 12"], 20, "mm")
    return page


@pytest.fixture(scope="module")
def reader():
    return RegionLayoutReader()


@pytest.fixture(scope="module")
def layout(reader):
    return reader.read(draw_page())


def line(left, top, right, bottom, text="words"):
    return Line(left=left, top=top, right=right, bottom=bottom, text=text)


def region(label, *box, confidence=1.0):
    return Region(label=label, box=box, confidence=confidence)


def contents(blocks):
    return [block.content for block in blocks]


def test_page(layout):
    assert layout.formatted_text.split("\n") == [
        "The Bridges of Lindal",
        " ".join(LEFT),
        "1 History",
        " ".join(HISTORY),
        " ".join(RIGHT),
        "Figure 1. The north gate in winter",
        "Table 1. Bridges and their lengths",
        HTML,
        "Page 12",
    ]
    assert [block.label for block in layout.blocks] == [
        "doc_title", "text", "paragraph_title", "text", "text", "image", "figure_title", "table_title", "table",
        "footer",
    ]  # fmt: skip
    assert layout.too_small == 0
    # The boxes are in pixels of the page: that of the figure is about where it was pasted.
    figure = next(block for block in layout.blocks if block.label == "image")
    assert figure.box == pytest.approx((430, 260, 750, 420), abs=20)


def test_the_policy_sees_boxes_on_request(layout):
    shown = layout_output(layout, show_boxes=True).text.split("\n")
    assert len(shown) == len(layout.blocks)
    assert shown[0].startswith("[doc_title] (")
    assert shown[0].endswith(") The Bridges of Lindal")
    assert shown[5].startswith("[image] (")
    assert shown[5].endswith(")")
    assert layout_output(layout).text == layout.formatted_text


def test_signs_read_as_without_regions_and_quietly(capfd):
    fresh = RegionLayoutReader()
    for picture, text in [
        (sign("Port of Lindal"), "Port of Lindal"),
        (sign("Museum Torvik\nbuilt 1932", (192, 96)), "Museum Torvik built 1932"),
        (Image.new("RGB", (96, 96), "teal"), ""),
        (Image.new("RGB", (3, 3), "teal"), ""),
    ]:
        assert fresh.read(picture).formatted_text == text
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not logging.getLogger("rapid_layout.model_handler.main").isEnabledFor(logging.ERROR)


def test_a_turned_picture(reader):
    turned = reader.read(sign("Port of Lindal").rotate(90, expand=True), any_orientation=True)
    assert (turned.formatted_text, turned.turned) == ("Port of Lindal", True)
    output = layout_output(turned, show_boxes=True)
    assert "turned upright" in output.note
    assert layout_output(turned).note is None


async def test_tool_through_the_executor():
    executor = ToolExecutor([local_layout_parsing(reader=RegionLayoutReader(), show_boxes=True)], timeout_s=60)
    small = sign("Kestrel Bridge").resize((80, 27), Image.Resampling.BICUBIC)
    images = book(sign("Port of Lindal"), small)
    try:
        read = await executor.execute(call("layout_parsing", image="img_1", use_chart_recognition=True), images, KEY)
        assert read.error is None
        assert "] (7,12,152,36) Port of Lindal Charts are not recognised here" in read.text
        unread = await executor.execute(call("layout_parsing", image="img_2"), images, KEY)
        assert unread.note == "The text is too small to read."
    finally:
        await executor.aclose()


def test_threads_share_one_engine(reader):
    images = [sign(f"Gate {i}{i}") for i in range(3)]
    found = {}

    def read(i):
        found[i] = reader.read(images[i]).formatted_text

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"Gate {i}{i}" for i in range(3)}


def test_without_rapid_layout(monkeypatch):
    really = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("rapid_layout"):
            raise ImportError("No module named 'rapid_layout'")
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=r"pip install 'opensearch-lightning\[layout\]'"):
        RegionLayoutReader()


def test_bad_settings():
    with pytest.raises(ConfigurationError, match="engines is 0"):
        RegionLayoutReader(engines=0)
    with pytest.raises(ConfigurationError, match=r"min_confidence is 1\.5"):
        RegionLayoutReader(min_confidence=1.5)


def test_lines_go_where_most_of_them_lies():
    regions = [region("text", 0, 0, 100, 50), region("reference", 0, 50, 100, 100)]
    lines = [
        line(0, 45, 90, 60, "below"),
        line(0, 38, 90, 53, "above"),
        line(0, 110, 90, 125, "outside"),
        line(95, 20, 180, 35, "beside"),
    ]
    found = {(block.label, block.content) for block in region_blocks(regions, lines)}
    assert found == {("text", "above"), ("reference", "below"), ("text", "outside"), ("text", "beside")}


def test_of_nested_regions_the_inner_one_has_the_line():
    regions = [region("reference", 0, 0, 300, 300), region("header", 10, 10, 200, 40)]
    blocks = region_blocks(regions, [line(20, 15, 100, 30, "inner"), line(20, 100, 100, 115, "outer")])
    assert {block.label: block.content for block in blocks} == {"header": "inner", "reference": "outer"}


def test_every_line_is_in_one_block():
    rng = np.random.default_rng(3)
    for _ in range(30):
        corners = rng.integers(0, 400, (12, 2))
        regions = [
            region(label, x, y, x + 150, y + 120)
            for (x, y), label in zip(
                corners, ["text", "image", "table", "header", "footer", "figure_title"] * 2, strict=True
            )
        ]
        lines = [line(x, y, x + 60, y + 12, f"w{i}x") for i, (x, y) in enumerate(rng.integers(0, 500, (25, 2)))]
        said = " ".join(contents(region_blocks(regions, lines)))
        assert [said.count(one.text) for one in lines] == [1] * 25


def test_without_regions_the_blocks_are_those_of_lines():
    lines = [line(0, y, 100, y + 10, str(y)) for y in (0, 12, 50, 62)]
    assert region_blocks([], lines) == layout_blocks(lines)
    assert region_blocks([], []) == []


def test_headers_and_footers_frame_the_page():
    regions = [
        region("text", 0, 0, 40, 60),
        region("footer", 0, 100, 40, 112),
        region("header", 60, 0, 100, 12),
        region("text", 60, 70, 100, 130),
    ]
    lines = [line(*one.box[:2], one.box[2], one.box[1] + 12, text) for one, text in zip(regions, "bdac", strict=True)]
    assert contents(region_blocks(regions, lines)) == ["a", "b", "c", "d"]


def test_a_short_caption_spans_what_its_table_spans():
    columns = [region("text", 0, 0, 45, 40), region("text", 55, 0, 100, 40)]
    table = [region("table_title", 0, 46, 40, 56), region("table", 0, 60, 100, 90)]
    lines = [
        line(0, 0, 45, 10, "left"), line(55, 0, 100, 10, "right"),
        line(0, 46, 40, 56, "Table"), line(0, 60, 40, 70, "cell"),
    ]  # fmt: skip
    html = "<table><tr><td>cell</td></tr></table>"
    assert contents(region_blocks([*table[::-1], *columns], lines)) == ["left", "right", "Table", html]


def test_text_in_an_image_follows_it():
    regions = [region("image", 0, 0, 300, 200), region("text", 0, 210, 300, 230)]
    lines = [line(20, 20, 200, 34, "top"), line(20, 100, 200, 114, "foot"), line(0, 212, 300, 226, "below")]
    blocks = region_blocks(regions, lines)
    assert [(block.label, block.content) for block in blocks] == [
        ("image", ""), ("text", "top"), ("text", "foot"), ("text", "below")
    ]  # fmt: skip


def test_the_models_usual_mistakes():
    title = region("paragraph_title", 0, 0, 200, 30)
    paragraph = region("paragraph_title", 0, 40, 100, 80)
    caption = region("text", 0, 90, 100, 100)
    said = region("text", 0, 200, 100, 210)
    lines = [
        line(0, 0, 200, 30, "Title"),
        *[line(0, y, 100, y + 10, "par") for y in (40, 53, 66)],
        line(0, 90, 100, 100, "Fig. 2: a gate"),
        line(0, 200, 100, 210, "Figure 2 shows a gate"),
    ]
    blocks = region_blocks([title, paragraph, caption, said], lines)
    assert [block.label for block in blocks] == ["doc_title", "text", "figure_title", "text"]


def test_a_title_below_text_is_no_title_of_the_page():
    regions = [region("text", 0, 0, 100, 30), region("paragraph_title", 0, 40, 100, 60)]
    lines = [line(0, 0, 100, 10), line(0, 13, 100, 23), line(0, 40, 100, 60)]
    assert [block.label for block in region_blocks(regions, lines)] == ["text", "paragraph_title"]
    # Below a single line it is, which may be a header.
    more = [line(0, y, 100, y + 10) for y in (80, 110)]
    assert [block.label for block in region_blocks(regions, [lines[0], lines[2], *more])][:2] == ["text", "doc_title"]


def test_tables_are_read_along_wide_rows():
    cells = [
        line(0, 0, 300, 10, "A long first cell"), line(320, 1, 600, 11, "and <b> & c"),
        line(0, 20, 280, 30, "second row"), line(330, 60, 590, 70, "alone"), line(310, 19, 340, 29, "x"),
        line(350, 21, 380, 31, "y"),
    ]  # fmt: skip
    assert html_table(cells[::-1]) == (
        "<table><tr><td>A long first cell</td><td>and &lt;b&gt; &amp; c</td></tr>"
        "<tr><td>second row</td><td>x y</td></tr><tr><td></td><td>alone</td></tr></table>"
    )


def test_what_is_said_of_nothing():
    empty = Layout(blocks=())
    assert layout_output(empty).text == layout_output(empty, show_boxes=True).text == "No text found."
    picture = Layout(blocks=(Block(label="image", content="", box=(0, 0.4, 9.6, 9)),))
    assert layout_output(picture).text == "No text found."
    assert layout_output(picture, show_boxes=True).text == "[image] (0,0,10,9)"
    low = Layout(blocks=(), too_small=2)
    assert (layout_output(low).text, layout_output(low).note) == ("", "The text is too small to read.")
