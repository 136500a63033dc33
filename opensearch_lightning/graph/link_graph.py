"""A directed link graph in compressed sparse rows, redirects dereferenced.

Shapes: ``N`` pages, ``E`` edges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from opensearch_lightning.errors import DataError

NO_RELATION = -1
_NO_PAGE = -1


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of a page: normalized target, the text shown, and the infobox row it stands in (``None``: prose)."""

    target: str
    anchor: str
    relation: str | None = None


@dataclass(frozen=True, kw_only=True)
class LinkGraph:
    """Articles as nodes, links as edges; edges of node ``u`` are ``indptr[u]:indptr[u+1]``.

    One edge for each (source, target, relation); its anchor is the first one met. A page's links to itself and links
    to pages that are not in the dump are left out. ``in_degree`` counts the distinct pages that link to a page.
    """

    titles: Sequence[str]
    indptr: NDArray[np.int64]  # [N + 1]
    targets: NDArray[np.int32]  # [E]
    relations: NDArray[np.int32]  # [E], index into strings, NO_RELATION in prose
    anchors: NDArray[np.int32]  # [E], index into strings
    in_degree: NDArray[np.int64]  # [N]
    strings: Sequence[str]
    redirects: dict[str, int]  # title of a redirect page -> node
    _nodes: dict[str, int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.titles)

    @property
    def n_edges(self) -> int:
        """Number of edges, ``E``."""
        return len(self.targets)

    def node(self, title: str) -> int:
        """The node of a normalized title; a redirect gives the page it leads to.

        Raises:
            KeyError: no such page.
        """
        found = self._nodes.get(title)
        return found if found is not None else self.redirects[title]

    def edges(self, node: int) -> range:
        """Indices of the edges that leave ``node``."""
        return range(int(self.indptr[node]), int(self.indptr[node + 1]))

    def relation(self, edge: int) -> str | None:
        """Infobox row that the edge stands in, or ``None`` for a link in prose."""
        index = int(self.relations[edge])
        return None if index == NO_RELATION else self.strings[index]

    def anchor(self, edge: int) -> str:
        """Text shown for the edge's link."""
        return self.strings[int(self.anchors[edge])]

    def hubs(self, in_degree: int) -> NDArray[np.int64]:
        """Nodes with more than ``in_degree`` linking pages."""
        return np.flatnonzero(self.in_degree > in_degree)


class LinkGraphBuilder:
    """Collects pages one at a time, so that a dump need not fit in memory as text; then :meth:`build`."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._titles: list[str] = []
        self._strings: dict[str, int] = {}
        self._pages: set[int] = set()
        self._redirects: dict[int, int] = {}
        self._edges = array("i")  # flat (source, target, relation, anchor)

    def add_page(self, title: str, links: Iterable[Link]) -> None:
        """Add an article.

        Raises:
            DataError: the title was added before.
        """
        source = self._id(title)
        if source in self._pages:
            raise DataError(f"page {title!r} occurs twice in the dump: give one revision of each page")
        self._pages.add(source)
        for link in links:
            relation = NO_RELATION if link.relation is None else self._string(link.relation)
            self._edges.extend((source, self._id(link.target), relation, self._string(link.anchor)))

    def add_redirect(self, title: str, target: str) -> None:
        """Add a redirect page."""
        self._redirects[self._id(title)] = self._id(target)

    def build(self) -> LinkGraph:
        """Dereference redirects (chains too; loops and dangling ones lead nowhere) and lay out the rows."""
        nodes = sorted(self._pages)
        node_of = np.full(len(self._titles), _NO_PAGE, dtype=np.int32)
        node_of[nodes] = np.arange(len(nodes), dtype=np.int32)
        resolved = {source: self._resolve(source) for source in self._redirects if source not in self._pages}
        for source, page in resolved.items():
            node_of[source] = _NO_PAGE if page is None else node_of[page]
        edges = np.array(self._edges, dtype=np.int32).reshape(-1, 4)
        edges[:, 0], edges[:, 1] = node_of[edges[:, 0]], node_of[edges[:, 1]]
        rows = _distinct(edges[(edges[:, 1] != _NO_PAGE) & (edges[:, 0] != edges[:, 1])])
        pairs = np.unique(rows[:, :2], axis=0)
        counts = np.bincount(rows[:, 0], minlength=len(nodes))
        titles = [self._titles[index] for index in nodes]
        return LinkGraph(
            titles=titles,
            indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            targets=np.ascontiguousarray(rows[:, 1]),
            relations=np.ascontiguousarray(rows[:, 2]),
            anchors=np.ascontiguousarray(rows[:, 3]),
            in_degree=np.bincount(pairs[:, 1], minlength=len(nodes)).astype(np.int64),
            strings=list(self._strings),
            redirects={self._titles[s]: int(node_of[p]) for s, p in resolved.items() if p is not None},
            _nodes={title: node for node, title in enumerate(titles)},
        )

    def _id(self, title: str) -> int:
        index = self._ids.setdefault(title, len(self._ids))
        if index == len(self._titles):
            self._titles.append(title)
        return index

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _resolve(self, source: int) -> int | None:
        seen = {source}
        while source not in self._pages:
            target = self._redirects.get(source)
            if target is None or target in seen:
                return None
            seen.add(target)
            source = target
        return source


def _distinct(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """First row of each (source, target, relation), ordered by source, page order kept within it."""
    _, first = np.unique(rows[:, :3], axis=0, return_index=True)
    rows = rows[np.sort(first)]
    return rows[np.argsort(rows[:, 0], kind="stable")]
