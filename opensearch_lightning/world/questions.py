"""Tasks from walks: the nested question, its answer, and splits that share no path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.graph.link_graph import LinkGraph
from opensearch_lightning.graph.walk import (
    Walk,
    WalkRules,
    constrained_walk,
    draw_seed,
    eligible_seeds,
    enumerate_walks,
)
from opensearch_lightning.world.entities import Entity
from opensearch_lightning.world.schema import TYPES

MAX_ANSWER_TOKENS = 6
# So many walks in a row that were drawn before mean that hardly any other is left.
_MAX_REPEATS = 200


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about the entity on a picture, and the walk behind it.

    ``path`` holds titles ``v_0 … v_h``, ``relations`` the rows followed, ``attribute`` the row of ``v_h`` asked for.
    """

    text: str
    answer: str
    aliases: tuple[str, ...]
    path: tuple[str, ...]
    relations: tuple[str, ...]
    attribute: str


class QuestionMaker:
    """Draws questions from walks over a world's link graph.

    Args:
        graph: links of the world's pages.
        rules: limits of the walks.
        entities: by title; pages of other titles (lists, countries) are no seeds and no answers.
        min_in_degree: an anchor has at least this many linking pages.
    """

    def __init__(
        self, graph: LinkGraph, rules: WalkRules, entities: Mapping[str, Entity], *, min_in_degree: int = 1
    ) -> None:
        self._graph = graph
        self._rules = rules
        self._entities = entities
        self._strata: dict[str, list[int]] = {name: [] for name in TYPES}
        for seed in eligible_seeds(graph, rules, min_in_degree=min_in_degree, max_in_degree=rules.hub_in_degree):
            entity = entities.get(graph.titles[seed])
            if entity is not None:
                self._strata[entity.type].append(int(seed))

    def splits(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> dict[str, list[Question]]:
        """Questions for each split. No two in the world share a path, so the splits are disjoint.

        Hops come in the shares of ``rules.hop_probabilities``; anchors are stratified over entity types.

        Raises:
            ConfigurationError: the world has too few walks for the sizes asked.
        """
        total = sum(sizes.values())
        walks: list[Walk] = []
        for hops, count in _quotas(self._rules.hop_probabilities, total).items():
            walks += self._distinct_walks(rng, hops, count)
        questions = [self._question(rng, walks[index]) for index in rng.permutation(total)]
        ends = np.cumsum(list(sizes.values()))
        return {
            name: questions[int(end) - size : int(end)] for (name, size), end in zip(sizes.items(), ends, strict=True)
        }

    def _distinct_walks(self, rng: np.random.Generator, hops: int, count: int) -> list[Walk]:
        """``count`` walks of ``hops`` hops, no two over the same nodes."""
        found: dict[tuple[int, ...], Walk] = {}
        repeats = 0
        while len(found) < count and repeats < _MAX_REPEATS:
            seed = draw_seed(rng, self._strata)
            walk = constrained_walk(
                self._graph, rng, self._rules, seed, hops=hops, accept_answer=lambda node: bool(self._asked_rows(node))
            )
            repeats += 1
            if walk is not None and walk.nodes not in found:
                found[walk.nodes] = walk
                repeats = 0
        if len(found) < count:
            raise ConfigurationError(
                f"{count} tasks of {hops} hops were asked, but this world of {len(self._entities)} pages has "
                f"{self._available(hops)} walks of {hops} hops, of which {len(found)} could be drawn: ask for fewer "
                f"tasks, or for some {len(self._entities) * 2 * count // max(len(found), 1)} pages"
            )
        return list(found.values())

    def _available(self, hops: int) -> int:
        seeds = [seed for nodes in self._strata.values() for seed in nodes]
        walks = (walk.nodes for seed in seeds for walk in enumerate_walks(self._graph, self._rules, seed, hops))
        return len(set(walks))

    def _asked_rows(self, node: int) -> list[str]:
        """Rows of a page that can be asked for: literal and short."""
        entity = self._entities.get(self._graph.titles[node])
        attributes = entity.attributes if entity is not None else {}
        return [row for row, value in attributes.items() if len(value.split()) <= MAX_ANSWER_TOKENS]

    def _question(self, rng: np.random.Generator, walk: Walk) -> Question:
        path = tuple(self._graph.titles[node] for node in walk.nodes)
        relations = tuple(self._graph.relation(edge) or "" for edge in walk.edges)
        rows = self._asked_rows(walk.nodes[-1])
        attribute = rows[int(rng.integers(len(rows)))]
        answer = self._entities[path[-1]].attributes[attribute]
        question = Question(
            text=question_text(self._entities[path[0]].type, relations, attribute),
            answer=answer,
            aliases=TYPES[self._entities[path[-1]].type].attributes[attribute].aliases(answer),
            path=path,
            relations=relations,
            attribute=attribute,
        )
        self._check(question)
        return question

    def _check(self, question: Question) -> None:
        """Eq. 6 of the curation: no alias of a node on the path stands in the question, nor does the answer."""
        names = [name for title in question.path for name in self._entities[title].names]
        given_away = names_in(question.text, [*names, question.answer])
        if given_away:
            raise ConfigurationError(
                f"the question {question.text!r} names {given_away}: a row of the schema equals a name or a value"
            )


def question_text(anchor_type: str, relations: Sequence[str], attribute: str) -> str:
    """The question, from the attribute asked for back to the picture; it names nothing but rows and a type."""
    chain = "".join(f" of the {relation}" for relation in reversed(relations))
    return f"What is the {attribute}{chain} of the {anchor_type} in the picture?"


def names_in(text: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that occur in ``text`` as whole words, whatever their case."""
    lower = text.lower()
    # Few names occur at all: the pattern is built for those only.
    met = [name for name in names if name.lower() in lower]
    return [name for name in met if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)]


def _quotas(probabilities: Mapping[int, float], total: int) -> dict[int, int]:
    """Whole numbers that sum to ``total``, in the shares given."""
    hops = sorted(probabilities)
    bounds = np.rint(np.cumsum([probabilities[h] for h in hops]) * total).astype(int)
    return {h: int(count) for h, count in zip(hops, np.diff(bounds, prepend=0), strict=True)}
