"""The pages of the world in wikitext, their MediaWiki export, and their plain text for the search index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from opensearch_lightning.graph.dump import Page
from opensearch_lightning.graph.wikitext import ParsedPage
from opensearch_lightning.world.entities import Entity
from opensearch_lightning.world.schema import COUNTRY, TYPES

SCHEMA = "0.11"
_NAMESPACES = {-1: "Special", 0: "", 1: "Talk", 2: "User", 4: "MiniWiki", 6: "File", 10: "Template", 14: "Category"}
_TIMESTAMP = "2025-05-01T00:00:00Z"


def write_pages(rng: np.random.Generator, entities: Sequence[Entity], countries: Sequence[str]) -> list[Page]:
    """Every page: entities, countries, disambiguation and list pages, templates, categories, redirects.

    Entities keep their ids; the others follow.
    """
    by_title = {entity.title: entity for entity in entities}
    texts: list[tuple[str, int, str, str | None]] = []
    texts += [(country, 0, _country_text(country, entities), None) for country in countries]
    texts += _disambiguation_pages(entities)
    for kind in TYPES.values():
        members = [entity for entity in entities if entity.type == kind.name]
        texts.append((f"List of {kind.plural}", 0, _list_text(kind.plural, members), None))
        texts.append((f"Template:Infobox {kind.name}", 10, "{{{name}}}, {{{country}}}", None))
        texts.append((f"Category:{kind.plural.capitalize()}", 14, f"See [[List of {kind.plural}]].", None))
    texts += [
        (alias, 0, f"#REDIRECT [[{entity.title}]]", entity.title) for entity in entities for alias in entity.aliases
    ]
    articles = [
        Page(title=entity.title, namespace=0, id=int(entity.id), text=_entity_text(rng, entity, by_title))
        for entity in entities
    ]
    others = [
        Page(title=title, namespace=namespace, id=number, text=text, redirect=redirect)
        for number, (title, namespace, text, redirect) in enumerate(texts, start=len(entities) + 1)
    ]
    return articles + others


def export_xml(pages: Iterable[Page], path: Path) -> None:
    """Write pages as a MediaWiki export, the same bytes for the same pages."""
    namespaces = "".join(
        f'      <namespace key="{key}" case="first-letter"' + (f">{name}</namespace>\n" if name else " />\n")
        for key, name in _NAMESPACES.items()
    )
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(
            f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-{SCHEMA}/" version="{SCHEMA}" xml:lang="en">\n'
            "  <siteinfo>\n    <sitename>MiniWiki</sitename>\n    <dbname>miniwiki</dbname>\n"
            f"    <case>first-letter</case>\n    <namespaces>\n{namespaces}    </namespaces>\n  </siteinfo>\n"
        )
        for page in pages:
            stream.write(_page_xml(page))
        stream.write("</mediawiki>\n")


def plain_text(title: str, page: ParsedPage, resolve: Callable[[str], str]) -> str:
    """A page as the reader of a search engine would give it.

    The lead, then one sentence for each infobox row; a page without an infobox (a list) names what it links to, one a
    line. ``resolve`` gives the title that a link target leads to.
    """
    if page.infobox_type is None:
        return "\n".join((page.lead, *(link.anchor for link in page.links)))
    rows = (
        f"The {name} of {title} is {resolve(row.target) if row.target else row.text}."
        for name, row in page.fields.items()
        if name not in ("name", "image")
    )
    return " ".join((page.lead, *rows))


def _entity_text(rng: np.random.Generator, entity: Entity, by_title: dict[str, Entity]) -> str:
    rows = [("name", entity.name), ("image", f"{entity.title}.png"), (COUNTRY, f"[[{entity.country}]]")]
    rows += [(row, _link(rng, by_title[target])) for row, target in entity.relations.items()]
    rows += entity.attributes.items()
    infobox = "".join(f"| {row} = {value}\n" for row, value in rows)
    also = "".join(f" (also '''{alias}''')" for alias in entity.aliases)
    article = "an" if entity.type[0] in "aeiou" else "a"
    other = by_title[list(entity.relations.values())[int(rng.integers(len(entity.relations)))]]
    shown = (*other.aliases, other.title)[0]
    return (
        f"{{{{Infobox {entity.type}\n{infobox}}}}}\n"
        f"'''{entity.name}'''{also} is {article} {entity.type} in [[{entity.country}]].\n\n"
        f"== See also ==\n* [[{shown}]]\n"
        f"* [[List of {TYPES[entity.type].plural}]]\n\n"
        f"[[Category:{TYPES[entity.type].plural.capitalize()}]]\n"
    )


def _link(rng: np.random.Generator, target: Entity) -> str:
    """A link to an entity: to a redirect of it now and then, always under its own name."""
    through = target.aliases[0] if target.aliases and rng.random() < 0.5 else target.title
    return f"[[{through}]]" if through == target.name else f"[[{through}|{target.name}]]"


def _country_text(country: str, entities: Sequence[Entity]) -> str:
    inside = [entity for entity in entities if entity.country == country and entity.type == "place"]
    links = "".join(f"* [[{entity.title}]]\n" for entity in inside)
    return f"{{{{Infobox country\n| name = {country}\n}}}}\n'''{country}''' is a country.\n\n== Places ==\n{links}"


def _list_text(plural: str, members: Sequence[Entity]) -> str:
    links = "".join(f"* [[{entity.title}]]\n" for entity in members)
    return f"This is a list of {plural}.\n\n== Members ==\n{links}"


def _disambiguation_pages(entities: Sequence[Entity]) -> list[tuple[str, int, str, str | None]]:
    meanings: dict[str, list[Entity]] = defaultdict(list)
    for entity in entities:
        if entity.title != entity.name:
            meanings[entity.name].append(entity)
    pages: list[tuple[str, int, str, str | None]] = []
    for name, sharing in meanings.items():
        links = "".join(f"* [[{entity.title}]]\n" for entity in sharing)
        title = f"{name} (disambiguation)"
        pages.append((title, 0, f"'''{name}''' may mean one of several things.\n\n== Meanings ==\n{links}", None))
        pages.append((name, 0, f"#REDIRECT [[{title}]]", title))
    return pages


def _page_xml(page: Page) -> str:
    redirect = f"    <redirect title={quoteattr(page.redirect)} />\n" if page.redirect else ""
    size = len(page.text.encode())
    return (
        f"  <page>\n    <title>{escape(page.title)}</title>\n    <ns>{page.namespace}</ns>\n    <id>{page.id}</id>\n"
        f"{redirect}    <revision>\n      <id>{page.id}</id>\n      <timestamp>{_TIMESTAMP}</timestamp>\n"
        "      <contributor>\n        <username>MiniWiki</username>\n        <id>1</id>\n      </contributor>\n"
        f"      <model>wikitext</model>\n      <format>text/x-wiki</format>\n"
        f'      <text bytes="{size}" xml:space="preserve">{escape(page.text)}</text>\n'
        "    </revision>\n  </page>\n"
    )
