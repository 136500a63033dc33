"""Links, infobox and lead of a page."""

from __future__ import annotations

from opensearch_lightning.graph import Link
from opensearch_lightning.graph.wikitext import InfoboxField, parse_page

PAGE = """\
{{Short description|x [[Hidden]]}}
{{Infobox_Company <!-- see the manual -->
| name = Velmar '''Works'''
| Founded_by = [[ada brun|A. Brun]] and [[Olle Vik]]
| seat = [[Torvik#Harbour]]
| empty =
}}
[[File:Works.png|thumb|The works at [[Torvik]]]]
'''Velmar Works''' is a [[company]] in [[Torvik|the town]].<ref>See [[Source]].</ref> See [[#History]].

== History ==
It grew. [[Category:Companies]] [[:Category:Towns]] [[User talk:Ann]]
"""


def test_infobox_rows_are_relations():
    page = parse_page(PAGE)
    assert page.infobox_type == "company"
    assert page.fields == {
        "name": InfoboxField(text="Velmar Works"),
        "founded by": InfoboxField(text="A. Brun and Olle Vik", target="Ada brun"),
        "seat": InfoboxField(text="Torvik#Harbour", target="Torvik"),
    }
    assert [link for link in page.links if link.relation] == [
        Link(target="Ada brun", anchor="A. Brun", relation="founded by"),
        Link(target="Olle Vik", anchor="Olle Vik", relation="founded by"),
        Link(target="Torvik", anchor="Torvik#Harbour", relation="seat"),
    ]


def test_links_in_prose_have_no_relation_and_furniture_is_left_out():
    prose = [link for link in parse_page(PAGE).links if link.relation is None]
    assert Link(target="Company", anchor="company") in prose
    assert Link(target="Torvik", anchor="the town") in prose
    assert not any(":" in link.target or not link.target for link in prose)
    # What stands in the infobox is not told again as prose.
    assert "Olle Vik" not in {link.target for link in prose}


def test_lead_is_plain_and_ends_at_the_first_heading():
    assert parse_page(PAGE).lead == "Velmar Works is a company in the town. See #History."


def test_a_page_without_infobox():
    page = parse_page("'''X''' may be [[A]].")
    assert page.infobox_type is None
    assert page.fields == {}
    assert page.links == (Link(target="A", anchor="A"),)
    assert parse_page("").lead == ""
