import logging
import threading

import pytest
from PIL import Image, ImageFilter

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import LayoutReader
from opensearch_lightning.tools.local import parse_layout
from opensearch_lightning.tools.ocr import Line, layout_blocks
from opensearch_lightning.tools.picture_tools import perspective_correct, sharpen, super_resolution
from tests.tools.fakes import book
from tests.tools.pictures import askew, sign


@pytest.fixture(scope="module")
def reader():
    return LayoutReader()


def text(reader, image):
    return reader.read(image).formatted_text


def line(left, top, right, bottom, words):
    return Line(left=left, top=top, right=right, bottom=bottom, text=words)


def contents(*lines):
    return [block.content for block in layout_blocks(list(lines))]


def test_reads_signs(reader, caplog):
    with caplog.at_level(logging.INFO):
        assert text(reader, sign("Port of Lindal")) == "Port of Lindal"
        assert text(reader, sign("Museum Torvik\nbuilt 1932", (192, 96))) == "Museum Torvik built 1932"
        assert text(reader, Image.new("RGB", (96, 96), "teal")) == ""
        assert text(reader, Image.new("RGB", (3, 3), "teal")) == ""
    assert caplog.records == []


def test_small_text_is_said_to_be_too_small_and_super_resolution_helps(reader):
    small = sign("Kestrel Bridge").resize((80, 27), Image.Resampling.BICUBIC)
    layout = reader.read(small)
    assert layout.blocks == ()
    assert layout.too_small == 1
    assert text(reader, super_resolution(small, 4).image) == "Kestrel Bridge"


def test_sharpening_helps(reader):
    blurred = sign("Kestrel Bridge", font=24).filter(ImageFilter.GaussianBlur(3))
    assert text(reader, blurred) == ""
    assert len(text(reader, sharpen(blurred, 1.5).image)) >= 8


def test_rectified_sign_can_be_read(reader):
    assert text(reader, perspective_correct(askew(sign("Kestrel Bridge"), 0.4)).image) == "Kestrel Bridge"


def test_orientation(reader):
    turned = sign("Port of Lindal").rotate(90, expand=True)
    assert reader.read(turned, any_orientation=True).formatted_text == "Port of Lindal"


def test_tool_text(reader):
    def parse(image, **options):
        arguments = {"image": "img_1", "use_chart_recognition": False, "use_doc_orientation_classify": False}
        return parse_layout(reader, arguments | options, book(image))

    found = parse(sign("Port of Lindal"))
    assert (found.text, found.note, found.hits) == ("Port of Lindal", None, None)
    assert parse(Image.new("RGB", (64, 64))).text == "No text found."
    assert parse(Image.new("RGB", (4000, 4), "white")).text == "No text found."
    small = parse(sign("Kestrel Bridge").resize((80, 27), Image.Resampling.BICUBIC))
    assert (small.text, small.note) == ("", "The text is too small to read.")
    assert "Charts" in parse(sign("Port of Lindal"), use_chart_recognition=True).note


def test_threads_share_one_engine(reader):
    images = [sign(f"Gate {i}{i}") for i in range(4)]
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: text(reader, images[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"Gate {i}{i}" for i in range(4)}


def test_columns_are_read_one_after_the_other():
    title = line(0, 0, 400, 20, "Title over both")
    left = [line(0, y, 180, y + 10, f"left {y}") for y in (40, 52, 64)]
    right = [line(220, y, 400, y + 10, f"right {y}") for y in (40, 52, 64)]
    mixed = [right[1], left[2], title, left[0], right[2], right[0], left[1]]
    assert contents(*mixed) == ["Title over both", "left 40 left 52 left 64", "right 40 right 52 right 64"]
    assert [block.label for block in layout_blocks(mixed)] == ["title", "text", "text"]


def test_cells_are_read_along_the_row():
    cells = [
        line(0, 0, 50, 10, "Built"), line(120, 1, 150, 11, "1932"),
        line(0, 40, 50, 50, "Length"), line(120, 41, 150, 51, "12 m"),
    ]  # fmt: skip
    assert contents(*cells[::-1]) == ["Built 1932", "Length 12 m"]


def test_paragraphs_end_at_gaps():
    lines = [line(0, y, 100, y + 10, str(y)) for y in (0, 12, 50, 62)]
    assert contents(*lines) == ["0 12", "50 62"]
    assert layout_blocks(lines)[1].box == (0, 50, 100, 72)
    assert contents() == []


def test_bad_engines():
    with pytest.raises(ConfigurationError, match="engines is 0"):
        LayoutReader(engines=0)
