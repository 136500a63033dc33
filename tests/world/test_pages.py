"""Pages of the world: their export, and what is read back from it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.graph import WalkRules, read_pages
from opensearch_lightning.graph.wikitext import InfoboxField, ParsedPage
from opensearch_lightning.world.entities import generate_entities
from opensearch_lightning.world.names import stems
from opensearch_lightning.world.pages import export_xml, plain_text, write_pages
from opensearch_lightning.world.reading import read_world_pages
from opensearch_lightning.world.schema import TYPES

HUB = 24


@pytest.fixture(scope="module")
def made():
    return generate_entities(np.random.default_rng(5), 120, hub_in_degree=HUB)


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "pages.xml"
    export_xml(write_pages(np.random.default_rng(6), *made), path)
    return path


@pytest.fixture(scope="module")
def read(path):
    return read_world_pages(path)


def test_what_is_read_back_is_what_was_made(made, read):
    entities, _ = made
    assert list(read.entities.values()) == entities
    assert {entity.type for entity in entities} == set(TYPES)


def test_every_entity_states_one_value_for_each_row(made):
    entities, countries = made
    by_title = {entity.title: entity for entity in entities}
    for entity in entities:
        kind = TYPES[entity.type]
        assert set(kind.relations) - {"spouse"} <= set(entity.relations) <= set(kind.relations)
        assert set(entity.attributes) == set(kind.attributes)
        assert entity.country in countries
        for row, target in entity.relations.items():
            assert by_title[target].type == kind.relations[row]
            assert target != entity.title
        if "spouse" in entity.relations:
            assert by_title[entity.relations["spouse"]].relations["spouse"] == entity.title


def test_names_are_distinct_and_words_of_the_schema_are_no_names(made):
    entities, _ = made
    titles = [title for entity in entities for title in (entity.title, *entity.aliases)]
    assert max(Counter(titles).values()) == 1
    rows = {word for kind in TYPES.values() for row in (*kind.relations, *kind.attributes) for word in row.split()}
    assert not rows & {word.lower() for entity in entities for word in entity.name.split()}
    shared = Counter(entity.name for entity in entities)
    assert {entity.name for entity in entities if entity.name != entity.title} == {
        n for n, c in shared.items() if c > 1
    }
    assert 2 <= sum(count > 1 for count in shared.values()) < 10


def test_stems_differ_by_more_than_a_letter():
    taken = [stem for stem, _ in zip(stems(np.random.default_rng(0), {"rone"}), range(200), strict=False)]
    assert "Rone" not in taken
    for i, first in enumerate(taken):
        for second in taken[:i]:
            if len(first) == len(second):
                assert sum(a != b for a, b in zip(first, second, strict=True)) > 1
            assert not (
                len(first) == len(second) + 1 and any(first[:k] + first[k + 1 :] == second for k in range(len(first)))
            )


def test_the_export_has_every_kind_of_page(path, made):
    pages = {page.title: page for page in read_pages(path)}
    entities, countries = made
    assert [page.id for page in pages.values()] == list(range(1, len(pages) + 1))
    assert {f"List of {kind.plural}" for kind in TYPES.values()} <= set(pages)
    assert set(countries) <= set(pages)
    shared = {entity.name for entity in entities if entity.name != entity.title}
    for name in shared:
        assert pages[name].redirect == f"{name} (disambiguation)"
        assert "[[" in pages[f"{name} (disambiguation)"].text
    aliased = next(entity for entity in entities if entity.aliases)
    assert pages[aliased.aliases[0]].redirect == aliased.title
    assert pages["Template:Infobox person"].namespace == 10
    assert pages["Category:People"].namespace == 14


def test_some_links_go_through_redirects(path):
    pages = {page.title: page for page in read_pages(path)}
    through = [
        alias
        for page in pages.values()
        for alias, target in pages.items()
        if target.redirect and f" = [[{alias}|" in page.text
    ]
    assert len(through) > 10


def test_countries_are_hubs_and_nothing_else_on_an_infobox_is(made, read):
    _, countries = made
    graph = read.graph
    hubs = {graph.titles[node] for node in graph.hubs(HUB)}
    assert set(countries) <= hubs
    assert not hubs & set(read.entities)
    lists = {title for title in hubs if WalkRules().is_filtered(title)}
    assert hubs == set(countries) | lists


def test_relation_edges_are_infobox_rows(read):
    graph = read.graph
    for entity in read.entities.values():
        node = graph.node(entity.title)
        rows = {graph.relation(e): graph.titles[graph.targets[e]] for e in graph.edges(node) if graph.relation(e)}
        assert rows == {**entity.relations, "country": entity.country}


def test_plain_text_has_a_sentence_for_each_row():
    page = ParsedPage(
        links=(),
        infobox_type="company",
        fields={
            "name": InfoboxField(text="Velmar Works"),
            "founder": InfoboxField(text="A. Brun", target="A. Brun"),
            "staff": InfoboxField(text="40"),
        },
        lead="Velmar Works is a company.",
    )
    text = plain_text("Velmar Works", page, {"A. Brun": "Ada Brun"}.__getitem__)
    assert text == (
        "Velmar Works is a company. The founder of Velmar Works is Ada Brun. The staff of Velmar Works is 40."
    )


def test_worlds_too_small_for_hubs_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match="pages=39: a world needs at least 40"):
        generate_entities(rng, 39, hub_in_degree=HUB)
    with pytest.raises(
        ConfigurationError, match="hub_in_degree=50: with 100 pages and 2 countries set it from 16 to 49"
    ):
        generate_entities(rng, 100, hub_in_degree=50)
    with pytest.raises(ConfigurationError, match="hub_in_degree=15"):
        generate_entities(rng, 100, hub_in_degree=15)


def test_the_lowest_limit_of_hubs_holds_whatever_the_seed():
    most = 0
    for seed in range(8):
        entities, _ = generate_entities(np.random.default_rng(seed), 80, hub_in_degree=16)
        naming = Counter(target for entity in entities for target in set(entity.relations.values()))
        # A list, a country and a disambiguation page may link to an entity as well.
        assert max(naming.values()) <= 13
        most = max(most, *naming.values())
    assert most >= 12
