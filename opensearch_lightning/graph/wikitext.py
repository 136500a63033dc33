"""What a page of wikitext links to, says in its infobox, and reads like as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mwparserfromhell
from mwparserfromhell.nodes import Template, Wikilink
from mwparserfromhell.wikicode import Wikicode

from opensearch_lightning.graph.dump import normalize_title
from opensearch_lightning.graph.link_graph import Link

# Targets in these namespaces are furniture (pictures, categories), not articles.
_NAMESPACES = re.compile(
    r"^(file|image|media|category|template|user|help|portal|wikipedia|special|module|draft|mediawiki)( talk)?:", re.I
)


@dataclass(frozen=True, kw_only=True)
class InfoboxField:
    """One infobox row: its plain text and, when it links anywhere, the normalized first target."""

    text: str
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParsedPage:
    """Links in page order, the first infobox, and the lead section as plain text.

    ``infobox_type`` is the lower-case word after "Infobox" (``None``: the page has no infobox); ``fields`` maps
    lower-case row names, blanks for underscores, to rows that are not empty.
    """

    links: tuple[Link, ...]
    infobox_type: str | None = None
    fields: Mapping[str, InfoboxField] = field(default_factory=dict)
    lead: str = ""


def parse_page(text: str) -> ParsedPage:
    """Parse one page's wikitext (mwparserfromhell).

    A link inside the infobox carries its row's name as ``relation``; other links carry ``None``. Links to files,
    categories and other namespaces are left out, and so are links to a section of the page itself.
    """
    code = mwparserfromhell.parse(text)
    infobox = next(filter(_is_infobox, code.ifilter_templates(recursive=False)), None)
    if infobox is None:
        return ParsedPage(links=tuple(_links(code, None)), lead=_lead(code))
    rows = {_row_name(str(row.name)): row.value for row in infobox.params}
    related = [link for name, value in rows.items() for link in _links(value, name)]
    code.remove(infobox)
    fields = {name: _field(value) for name, value in rows.items()}
    return ParsedPage(
        links=(*related, *_links(code, None)),
        infobox_type=_row_name(infobox.name.strip_code())[len("infobox") :].strip(),
        fields={name: row for name, row in fields.items() if row.text},
        lead=_lead(code),
    )


def _is_infobox(template: Template) -> bool:
    return _row_name(template.name.strip_code()).startswith("infobox")


def _row_name(name: str) -> str:
    return " ".join(name.replace("_", " ").lower().split())


def _links(code: Wikicode, relation: str | None) -> Iterable[Link]:
    for node in code.ifilter_wikilinks():
        target = _article(node)
        if target:
            anchor = node.text.strip_code() if node.text is not None else str(node.title)
            yield Link(target=target, anchor=" ".join(anchor.split()), relation=relation)


def _article(link: Wikilink) -> str | None:
    title = normalize_title(str(link.title))
    return title if title and not _NAMESPACES.match(title) else None


def _field(value: Wikicode) -> InfoboxField:
    targets = (target for node in value.ifilter_wikilinks() if (target := _article(node)))
    return InfoboxField(text=" ".join(value.strip_code().split()), target=next(targets, None))


def _lead(code: Wikicode) -> str:
    sections = code.get_sections(include_lead=True, flat=True)
    if not sections:
        return ""
    lead = sections[0]
    notes = lead.filter_tags(recursive=False, matches=lambda node: str(node.tag).lower() == "ref")
    links = lead.filter_wikilinks(recursive=False)
    furniture = [node for node in links if _NAMESPACES.match(normalize_title(str(node.title)))]
    for node in (*notes, *furniture):
        lead.remove(node)
    return " ".join(lead.strip_code().split())
