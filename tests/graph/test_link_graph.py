"""Link graph: redirects, parallel edges, in-degree."""

from __future__ import annotations

import numpy as np
import pytest

from opensearch_lightning.errors import DataError
from opensearch_lightning.graph import Link, LinkGraph, LinkGraphBuilder


def build() -> LinkGraph:
    builder = LinkGraphBuilder()
    builder.add_redirect("Old B", "Older B")
    builder.add_redirect("Older B", "B")
    builder.add_redirect("Loop 1", "Loop 2")
    builder.add_redirect("Loop 2", "Loop 1")
    builder.add_redirect("Nowhere", "Missing")
    builder.add_page(
        "A",
        [
            Link(target="Old B", anchor="old b"),
            Link(target="B", anchor="b"),
            Link(target="B", anchor="the seat", relation="seat"),
            Link(target="Older B", anchor="the town", relation="town"),
            Link(target="A", anchor="self"),
            Link(target="Loop 1", anchor="x"),
            Link(target="Nowhere", anchor="x"),
            Link(target="Red link", anchor="x"),
        ],
    )
    builder.add_page("C", [Link(target="Older B", anchor="b")])
    builder.add_page("B", [Link(target="C", anchor="c", relation="twin")])
    return builder.build()


def test_redirects_are_dereferenced_first():
    graph = build()
    a, b, c = graph.node("A"), graph.node("B"), graph.node("C")
    assert len(graph) == 3
    assert graph.node("Old B") == graph.node("Older B") == b
    assert graph.redirects == {"Old B": b, "Older B": b}
    edges = [(graph.targets[e], graph.relation(e), graph.anchor(e)) for e in graph.edges(a)]
    assert edges == [(b, None, "old b"), (b, "seat", "the seat"), (b, "town", "the town")]
    assert [(graph.targets[e], graph.relation(e)) for e in graph.edges(b)] == [(c, "twin")]


def test_in_degree_counts_pages_not_links():
    graph = build()
    degree = {title: int(graph.in_degree[node]) for node, title in enumerate(graph.titles)}
    assert degree == {"A": 0, "B": 2, "C": 1}
    assert [graph.titles[node] for node in graph.hubs(1)] == ["B"]
    assert graph.hubs(2).size == 0


def test_rows_are_laid_out_as_csr():
    graph = build()
    assert graph.indptr[0] == 0
    assert graph.indptr[-1] == graph.n_edges == 5
    assert np.all(np.diff(graph.indptr) == [len(graph.edges(node)) for node in range(len(graph))])


def test_unknown_and_repeated_titles():
    with pytest.raises(KeyError, match="Red link"):
        build().node("Red link")
    builder = LinkGraphBuilder()
    builder.add_page("A", [])
    with pytest.raises(DataError, match="'A' occurs twice"):
        builder.add_page("A", [])


def test_an_empty_dump():
    graph = LinkGraphBuilder().build()
    assert len(graph) == graph.n_edges == 0
