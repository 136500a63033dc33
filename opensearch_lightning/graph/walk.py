"""Constrained random walks: seeds, hubs, filtered pages and retries of the curation recipe (section 5.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.graph.link_graph import NO_RELATION, LinkGraph

NodeTest = Callable[[int], bool]


class Rejection(StrEnum):
    """Why one attempt at a walk was given up."""

    HUB = "hub"
    FILTERED = "filtered"
    DEAD_END = "dead_end"
    BRIDGE = "bridge"
    ANSWER = "answer"


@dataclass(frozen=True, kw_only=True)
class WalkRules:
    """Limits of a walk; the defaults are those of English Wikipedia.

    ``hop_probabilities`` maps a number of hops to its probability. A page is a hub when more than ``hub_in_degree``
    pages link to it. ``relations_only`` walks over links of infobox rows alone.

    Raises:
        ConfigurationError: probabilities that do not sum to 1, or limits below 1.
    """

    hop_probabilities: Mapping[int, float] = field(default_factory=lambda: {2: 0.4, 3: 0.4, 4: 0.2})
    hub_in_degree: int = 10_000
    max_retries: int = 10
    relations_only: bool = False
    filtered_fragments: Sequence[str] = ("(disambiguation)",)
    filtered_prefixes: Sequence[str] = ("List of", "Outline of", "Index of", "Timeline of")
    filtered_namespaces: Sequence[str] = ("Template", "Category", "File", "User", "Help", "Portal", "Wikipedia")

    def __post_init__(self) -> None:
        probabilities = self.hop_probabilities
        total = sum(probabilities.values())
        if not probabilities or min(probabilities.values()) < 0 or abs(total - 1) > 1e-6:
            raise ConfigurationError(f"hop_probabilities={dict(probabilities)} sum to {total:g}: they must sum to 1")
        for name, value in (("hops", min(probabilities)), ("hub_in_degree", self.hub_in_degree)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: must be at least 1")
        if self.max_retries < 0:
            raise ConfigurationError(f"max_retries={self.max_retries}: must be 0 or more")

    def is_filtered(self, title: str) -> bool:
        """Whether a page of this title may never stand on a walk."""
        return (
            any(fragment in title for fragment in self.filtered_fragments)
            or title.startswith(tuple(self.filtered_prefixes))
            or title.partition(":")[0] in self.filtered_namespaces
        )

    def draw_hops(self, rng: np.random.Generator) -> int:
        """A number of hops."""
        hops = list(self.hop_probabilities)
        return int(rng.choice(hops, p=np.array([self.hop_probabilities[h] for h in hops])))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Anchor, bridges and answer node ``v_0 … v_h``, with the edges between them."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    @property
    def hops(self) -> int:
        """Number of edges, ``h``."""
        return len(self.edges)


def eligible_seeds(
    graph: LinkGraph, rules: WalkRules, *, min_in_degree: int = 50, max_in_degree: int = 10_000
) -> NDArray[np.int64]:
    """Nodes whose in-degree lies in the closed interval and whose title is not filtered."""
    inside = np.flatnonzero((graph.in_degree >= min_in_degree) & (graph.in_degree <= max_in_degree))
    return np.array([node for node in inside.tolist() if not rules.is_filtered(graph.titles[node])], dtype=np.int64)


def draw_seed(rng: np.random.Generator, strata: Mapping[str, Sequence[int]]) -> int:
    """A seed drawn with equal weight for each stratum that is not empty, then uniformly inside it.

    Raises:
        ConfigurationError: every stratum is empty.
    """
    filled = [nodes for nodes in strata.values() if len(nodes)]
    if not filled:
        raise ConfigurationError(f"no seed in any of the strata {sorted(strata)}: widen the in-degree limits")
    nodes = filled[int(rng.integers(len(filled)))]
    return int(nodes[int(rng.integers(len(nodes)))])


def constrained_walk(
    graph: LinkGraph,
    rng: np.random.Generator,
    rules: WalkRules,
    seed: int,
    *,
    hops: int | None = None,
    accept_bridge: NodeTest | None = None,
    accept_answer: NodeTest | None = None,
    rejections: Counter[Rejection] | None = None,
) -> Walk | None:
    """Walk from ``seed``, or ``None`` when the first try and ``rules.max_retries`` more all failed.

    Each step takes an edge uniformly among those that lead to a page not yet visited. An attempt fails at a hub, at a
    filtered page, where no edge is left, or where a test refuses the node. The number of hops is drawn once for a seed:
    drawn anew at each retry, failures would make long walks rarer than asked.

    Args:
        graph: the link graph.
        rng: source of all choices.
        rules: limits.
        seed: anchor node ``v_0``; not tested.
        hops: fixed number of hops in place of a drawn one.
        accept_bridge: test of ``v_1 … v_{h-1}`` (say, that a descriptor of it is unique).
        accept_answer: test of ``v_h`` (say, that it has a short attribute).
        rejections: counts failed attempts by reason, in place.
    """
    n_hops = rules.draw_hops(rng) if hops is None else hops
    for _ in range(rules.max_retries + 1):
        result = _attempt(graph, rng, rules, seed, n_hops, accept_bridge, accept_answer)
        if isinstance(result, Walk):
            return result
        if rejections is not None:
            rejections[result] += 1
    return None


def enumerate_walks(
    graph: LinkGraph, rules: WalkRules, seed: int, hops: int, *, accept_answer: NodeTest | None = None
) -> Iterator[Walk]:
    """Every walk of ``hops`` hops that :func:`constrained_walk` could return from ``seed``."""

    def extend(nodes: tuple[int, ...], edges: tuple[int, ...]) -> Iterator[Walk]:
        if len(edges) == hops:
            yield Walk(nodes=nodes, edges=edges)
            return
        test = accept_answer if len(edges) == hops - 1 else None
        for edge in _open_edges(graph, rules, nodes):
            node = int(graph.targets[edge])
            if _refusal(graph, rules, node) is None and (test is None or test(node)):
                yield from extend((*nodes, node), (*edges, edge))

    return extend((seed,), ())


def _attempt(
    graph: LinkGraph,
    rng: np.random.Generator,
    rules: WalkRules,
    seed: int,
    hops: int,
    accept_bridge: NodeTest | None,
    accept_answer: NodeTest | None,
) -> Walk | Rejection:
    nodes, edges = [seed], list[int]()
    for hop in range(1, hops + 1):
        candidates = _open_edges(graph, rules, nodes)
        if not candidates:
            return Rejection.DEAD_END
        edge = candidates[int(rng.integers(len(candidates)))]
        node = int(graph.targets[edge])
        refusal = _refusal(graph, rules, node)
        if refusal is not None:
            return refusal
        test, reason = (accept_answer, Rejection.ANSWER) if hop == hops else (accept_bridge, Rejection.BRIDGE)
        if test is not None and not test(node):
            return reason
        nodes.append(node)
        edges.append(edge)
    return Walk(nodes=tuple(nodes), edges=tuple(edges))


def _open_edges(graph: LinkGraph, rules: WalkRules, visited: Sequence[int]) -> list[int]:
    return [
        edge
        for edge in graph.edges(visited[-1])
        if int(graph.targets[edge]) not in visited
        and not (rules.relations_only and graph.relations[edge] == NO_RELATION)
    ]


def _refusal(graph: LinkGraph, rules: WalkRules, node: int) -> Rejection | None:
    if graph.in_degree[node] > rules.hub_in_degree:
        return Rejection.HUB
    return Rejection.FILTERED if rules.is_filtered(graph.titles[node]) else None
