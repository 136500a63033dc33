"""The world's own pages, read back from its export: graph, facts, and plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opensearch_lightning.graph.dump import Page, read_pages
from opensearch_lightning.graph.link_graph import LinkGraph, LinkGraphBuilder
from opensearch_lightning.graph.wikitext import ParsedPage, parse_page
from opensearch_lightning.tools.text_index import Document
from opensearch_lightning.world.entities import Entity, page_url
from opensearch_lightning.world.pages import plain_text
from opensearch_lightning.world.schema import COUNTRY, TYPES


@dataclass(frozen=True, kw_only=True)
class WorldPages:
    """What the export says: link graph, entities by title in page order, and documents to search."""

    graph: LinkGraph
    entities: Mapping[str, Entity]
    documents: Sequence[Document]


def read_world_pages(path: Path) -> WorldPages:
    """Parse an export that :func:`opensearch_lightning.world.pages.export_xml` wrote. Tasks rest on this alone."""
    builder = LinkGraphBuilder()
    parsed: list[tuple[Page, ParsedPage]] = []
    for page in read_pages(path):
        if page.namespace:
            continue
        if page.redirect is not None:
            builder.add_redirect(page.title, page.redirect)
        else:
            content = parse_page(page.text)
            builder.add_page(page.title, content.links)
            parsed.append((page, content))
    graph = builder.build()
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, node in graph.redirects.items():
        aliases[graph.titles[node]].append(alias)
    entities = {
        page.title: _entity(page, content, graph, aliases[page.title])
        for page, content in parsed
        if content.infobox_type in TYPES
    }
    documents = [
        Document(
            id=str(page.id),
            title=page.title,
            url=page_url(str(page.id)),
            text=plain_text(page.title, content, lambda target: graph.titles[graph.node(target)]),
        )
        for page, content in parsed
    ]
    return WorldPages(graph=graph, entities=entities, documents=documents)


def _entity(page: Page, content: ParsedPage, graph: LinkGraph, aliases: Sequence[str]) -> Entity:
    linked = {row: graph.titles[graph.node(f.target)] for row, f in content.fields.items() if f.target}
    return Entity(
        id=str(page.id),
        title=page.title,
        name=content.fields["name"].text,
        type=content.infobox_type or "",
        country=linked.pop(COUNTRY),
        relations=linked,
        attributes={
            row: f.text for row, f in content.fields.items() if f.target is None and row not in ("name", "image")
        },
        aliases=tuple(aliases),
    )
