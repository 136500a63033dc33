"""Reader of MediaWiki exports."""

from __future__ import annotations

import bz2
import gzip
import os
from itertools import islice
from pathlib import Path

import pytest

from opensearch_lightning.errors import DataError
from opensearch_lightning.graph import LinkGraphBuilder, Page, normalize_title, read_pages
from opensearch_lightning.graph.wikitext import parse_page

SAMPLES = Path(os.environ.get("OPENSEARCH_SAMPLES", Path(__file__).parents[3] / "shared" / "data"))
SAMPLE = SAMPLES / "enwiki-sample.xml.bz2"

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-{0}/" version="{0}" xml:lang="en">\n'
PAGES = """\
<siteinfo><sitename>W</sitename></siteinfo>
<page><title>ada brun</title><ns>0</ns><id>7</id>
  <revision><id>1</id><text>old</text></revision>
  <revision><id>2</id><contributor><id>99</id></contributor><origin>2</origin>
    <text bytes="9" sha1="x" xml:space="preserve">R&amp;D [[a]]</text></revision></page>
<page><title>A. Brun</title><ns>0</ns><id>8</id><redirect title="Ada_Brun#Life" />
  <revision><id>3</id><text>#REDIRECT [[Ada Brun]]</text></revision></page>
<page><title>Talk:Ada Brun</title><ns>1</ns><id>9</id><revision><id>4</id><text deleted="deleted" /></revision></page>
"""
EXPECTED = [
    Page(title="Ada brun", namespace=0, id=7, text="R&D [[a]]"),
    Page(title="A. Brun", namespace=0, id=8, text="#REDIRECT [[Ada Brun]]", redirect="Ada Brun"),
    Page(title="Talk:Ada Brun", namespace=1, id=9, text=""),
]


@pytest.mark.parametrize("schema", ["0.10", "0.11"])
@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".bz2", bz2.open), (".gz", gzip.open)])
def test_reads_both_schemas_plain_and_compressed(tmp_path, schema, suffix, opener):
    path = tmp_path / f"dump.xml{suffix}"
    with opener(path, "wb") as stream:
        stream.write((HEAD.format(schema) + PAGES + "</mediawiki>").encode())
    assert list(read_pages(path)) == EXPECTED


def test_streams(tmp_path):
    path = tmp_path / "dump.xml"
    # Some hundred kB of pages, then damage: the first page must come before the reader ever meets it.
    filler = "".join(f"<page><title>T{i}</title><id>{i}</id></page>" for i in range(8_000))
    path.write_text(HEAD.format("0.11") + filler + "<page><broken", encoding="utf-8")
    pages = read_pages(path)
    assert [page.title for page in islice(pages, 3)] == ["T0", "T1", "T2"]
    with pytest.raises(DataError, match=r"dump\.xml is damaged or cut"):
        list(pages)


def test_refuses_what_it_cannot_read(tmp_path):
    with pytest.raises(DataError, match="no dump at"):
        list(read_pages(tmp_path / "none.xml"))
    other = tmp_path / "other.xml"
    other.write_text(HEAD.format("0.3") + "</mediawiki>", encoding="utf-8")
    with pytest.raises(DataError, match=r"expected a MediaWiki export of schema 0\.10 or 0\.11"):
        list(read_pages(other))
    whole = bz2.compress((HEAD.format("0.11") + PAGES + "</mediawiki>").encode())
    cut = tmp_path / "cut.xml.bz2"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or cut"):
        list(read_pages(cut))


@pytest.mark.parametrize(
    ("title", "normal"),
    [
        ("ada_brun", "Ada brun"),
        (":Ada  Brun#Early life", "Ada Brun"),
        ("#History", ""),
        ("R&amp;D", "R&D"),
        ("élan", "Élan"),
    ],
)
def test_normalize_title(title, normal):
    assert normalize_title(title) == normal


@pytest.mark.skipif(not SAMPLE.exists(), reason="the enwiki sample is not here: set OPENSEARCH_SAMPLES to its folder")
def test_a_real_dump():
    pages = list(read_pages(SAMPLE))
    articles = [page for page in pages if page.redirect is None]
    assert len(pages) == 206
    assert len(articles) == 106
    assert {page.title: page.redirect for page in pages}["AccessibleComputing"] == "Computer accessibility"
    builder = LinkGraphBuilder()
    for page in pages:
        if page.redirect is not None:
            builder.add_redirect(page.title, page.redirect)
        elif page.title in {"Alaska", "Anarchism", "America the Beautiful"}:
            parsed = parse_page(page.text)
            builder.add_page(page.title, parsed.links)
            if page.title == "Alaska":
                assert parsed.infobox_type == "u.s. state"
                assert parsed.fields["capital"].target == "Juneau, Alaska"
                assert parsed.lead.startswith("Alaska () is a U.S. state situated in the northwest extremity")
                assert "Category:" not in "".join(link.target for link in parsed.links)
    graph = builder.build()
    assert sorted(graph.titles) == ["Alaska", "America the Beautiful", "Anarchism"]
