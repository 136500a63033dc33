"""The truth behind the pages: entities with their names, relations and facts, made from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.world.names import given_names, stems
from opensearch_lightning.world.schema import COUNTRY, TYPES, EntityType

MIN_ENTITIES = 40
# People and places are named by six others on average; a lower limit could leave a row without candidates.
MIN_HUB_IN_DEGREE = 16


@dataclass(frozen=True, kw_only=True)
class Entity:
    """One entity as its page states it.

    ``title`` is unique; ``name`` is shared by a few, whose titles carry the type in brackets. ``relations`` maps a row
    to the title of its value, ``attributes`` a row to its value, ``aliases`` are titles of redirects to this page.
    """

    id: str
    title: str
    name: str
    type: str
    country: str
    relations: Mapping[str, str]
    attributes: Mapping[str, str]
    aliases: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Address of its page, the same in both indexes."""
        return page_url(self.id)

    @property
    def names(self) -> tuple[str, ...]:
        """Every string that would give the entity away."""
        return tuple(dict.fromkeys((self.title, self.name, *self.aliases)))


def page_url(page_id: str) -> str:
    """Address of the page with this id."""
    return f"miniwiki/{page_id}"


@dataclass(frozen=True, kw_only=True)
class _Draft:
    title: str
    name: str
    kind: EntityType
    aliases: tuple[str, ...]


def generate_entities(rng: np.random.Generator, pages: int, *, hub_in_degree: int) -> tuple[list[Entity], list[str]]:
    """``pages`` entities, and the titles of their countries (the hubs).

    No entity is named by more than ``hub_in_degree`` others, and each country by more than that.

    Raises:
        ConfigurationError: fewer than ``MIN_ENTITIES`` pages, or so few that no country could be a hub.
    """
    if pages < MIN_ENTITIES:
        raise ConfigurationError(f"pages={pages}: a world needs at least {MIN_ENTITIES} for walks of four hops")
    n_countries = max(1, min(pages // 50, 12))
    if not MIN_HUB_IN_DEGREE <= hub_in_degree < pages // n_countries:
        raise ConfigurationError(
            f"hub_in_degree={hub_in_degree}: with {pages} pages and {n_countries} countries set it from "
            f"{MIN_HUB_IN_DEGREE} to {pages // n_countries - 1}, so that the countries are hubs and nothing else is"
        )
    fresh = stems(rng, _schema_words())
    countries = [f"{next(fresh)}land" for _ in range(n_countries)]
    drafts = _draft_names(rng, pages, fresh)
    relations = _draw_relations(rng, drafts, limit=hub_in_degree)
    order = rng.permutation(pages)
    entities = [
        Entity(
            id=str(number),
            title=draft.title,
            name=draft.name,
            type=draft.kind.name,
            country=countries[int(order[number - 1]) % n_countries],
            relations=relations[number - 1],
            attributes={row: values.draw(rng) for row, values in draft.kind.attributes.items()},
            aliases=draft.aliases,
        )
        for number, draft in enumerate(drafts, start=1)
    ]
    return entities, countries


def _schema_words() -> set[str]:
    rows = {row for kind in TYPES.values() for row in (*kind.relations, *kind.attributes)}
    values = {
        word
        for kind in TYPES.values()
        for attribute in kind.attributes.values()
        for word in getattr(attribute, "choices", ())
    }
    return {word for row in (*rows, *values, *TYPES, COUNTRY) for word in row.split()}


def _draft_names(rng: np.random.Generator, pages: int, fresh: Iterator[str]) -> list[_Draft]:
    kinds = _shares(pages)
    given = given_names(rng, 24)
    drafts = []
    shared: list[str] = []
    for number, kind in enumerate(kinds):
        stem = next(fresh)
        suffix = kind.suffixes[int(rng.integers(len(kind.suffixes)))]
        first = given[int(rng.integers(len(given)))]
        name = f"{first} {stem}" if kind.name == "person" else f"{stem} {suffix}".strip()
        # Places give their names to a few things: those titles need a disambiguation page.
        if kind.name == "place" and number % 8 == 0:
            shared.append(name)
        elif kind.name == "artifact" and shared:
            name = stem = shared.pop()
        alias = kind.alias.format(initial=first[0], stem=stem, name=name)
        drafts.append((name, kind, (alias,) if rng.random() < 0.4 else ()))
    uses = Counter(name for name, _, _ in drafts)
    return [
        _Draft(title=name if uses[name] == 1 else f"{name} ({kind.name})", name=name, kind=kind, aliases=aliases)
        for name, kind, aliases in drafts
    ]


def _shares(pages: int) -> list[EntityType]:
    """The type of each page: shares by weight, in the order of the schema."""
    total = sum(kind.weight for kind in TYPES.values())
    bounds = np.cumsum([kind.weight / total * pages for kind in TYPES.values()]).round().astype(int)
    counts = np.diff(np.concatenate(([0], bounds)))
    return [kind for kind, count in zip(TYPES.values(), counts, strict=True) for _ in range(int(count))]


def _draw_relations(rng: np.random.Generator, drafts: list[_Draft], *, limit: int) -> list[dict[str, str]]:
    """Values of every relation row; some things are named more often than others.

    At most ``limit`` pages link to any: lists, countries, disambiguation pages and spouses take one each.
    """
    by_type = {name: [i for i, draft in enumerate(drafts) if draft.kind.name == name] for name in TYPES}
    popularity = rng.gamma(2.0, size=len(drafts))
    named_by: Counter[int] = Counter()
    rows: list[dict[str, str]] = [{} for _ in drafts]
    for source, draft in enumerate(drafts):
        taken = {source}
        for relation, target_type in draft.kind.relations.items():
            if relation == "spouse":
                continue
            pool = [i for i in by_type[target_type] if i not in taken and named_by[i] < limit - 4]
            weights = popularity[pool]
            target = pool[int(rng.choice(len(pool), p=weights / weights.sum()))]
            named_by[target] += 1
            taken.add(target)
            rows[source][relation] = drafts[target].title
    _marry(rng, drafts, by_type["person"], rows)
    return rows


def _marry(rng: np.random.Generator, drafts: list[_Draft], people: list[int], rows: list[dict[str, str]]) -> None:
    """Marriages are mutual and nobody marries a teacher; those left over stay single."""
    order = [people[i] for i in rng.permutation(len(people))]
    for one, other in zip(order[::2], order[1::2], strict=False):
        teachers = {rows[one]["teacher"], rows[other]["teacher"]}
        if drafts[one].title not in teachers and drafts[other].title not in teachers:
            rows[one]["spouse"] = drafts[other].title
            rows[other]["spouse"] = drafts[one].title
