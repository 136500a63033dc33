"""Constrained walks (recipe, section 5.3)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.graph import (
    Link,
    LinkGraph,
    LinkGraphBuilder,
    Rejection,
    WalkRules,
    constrained_walk,
    draw_seed,
    eligible_seeds,
    enumerate_walks,
)


def graph_of(links: dict[str, list[str]], relation: str | None = "r") -> LinkGraph:
    builder = LinkGraphBuilder()
    for title in {**links, **{t: [] for targets in links.values() for t in targets}}:
        builder.add_page(title, [Link(target=t, anchor=t, relation=relation) for t in links.get(title, [])])
    return builder.build()


def rules(**options) -> WalkRules:
    return WalkRules(**{"hop_probabilities": {2: 1.0}, **options})


def titles(graph: LinkGraph, walk) -> list[str]:
    return [graph.titles[node] for node in walk.nodes]


def test_cycles_are_skipped():
    graph = graph_of({"A": ["B"], "B": ["A", "C"], "C": ["A", "B", "D"]})
    for seed in range(20):
        walk = constrained_walk(graph, np.random.default_rng(seed), rules(), graph.node("A"), hops=3)
        assert titles(graph, walk) == ["A", "B", "C", "D"]
        assert [graph.targets[e] for e in walk.edges] == list(walk.nodes[1:])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("Hub", Rejection.HUB),
        ("B (disambiguation)", Rejection.FILTERED),
        ("List of places", Rejection.FILTERED),
        ("Outline of B", Rejection.FILTERED),
        ("Index of B", Rejection.FILTERED),
        ("Timeline of B", Rejection.FILTERED),
        ("Template:B", Rejection.FILTERED),
        ("Wikipedia:B", Rejection.FILTERED),
        ("Portal:B", Rejection.FILTERED),
    ],
)
def test_hubs_and_filtered_pages_are_never_on_a_walk(bad, reason):
    linking = {f"P{i}": ["Hub"] for i in range(5)}
    graph = graph_of({"A": ["B", bad], "B": ["C", bad], bad: ["C"], "C": [], **linking})
    found: Counter[Rejection] = Counter()
    for seed in range(30):
        walk = constrained_walk(
            graph, np.random.default_rng(seed), rules(hub_in_degree=4), graph.node("A"), rejections=found
        )
        assert walk is None or titles(graph, walk) == ["A", "B", "C"]
    assert set(found) == {reason}


def test_a_title_is_filtered_by_its_beginning_or_mark_only():
    assert not rules().is_filtered("The List of Adrian Messenger")
    assert not rules().is_filtered("Disambiguation")
    assert not rules().is_filtered("Mission: Impossible")
    assert rules().is_filtered("Help:Contents")


def test_a_seed_is_retried_ten_times_then_dropped():
    graph = graph_of({"A": ["B"], "B": ["C"]})
    found: Counter[Rejection] = Counter()
    rng = np.random.default_rng(0)
    refuse = constrained_walk(graph, rng, rules(), graph.node("A"), accept_answer=lambda node: False, rejections=found)
    assert refuse is None
    assert found == {Rejection.ANSWER: 11}
    # Nine ways in ten lead to the hub: with retries most seeds still give a walk, without them few.
    wide = graph_of({"A": ["B", *(f"H{i} (disambiguation)" for i in range(9))], "B": ["C"]})
    count = {
        retries: sum(
            constrained_walk(wide, np.random.default_rng(s), rules(max_retries=retries), wide.node("A")) is not None
            for s in range(100)
        )
        for retries in (0, 10)
    }
    assert count[0] < 25
    assert 50 < count[10] < 90  # 1 - 0.9 ** 11 = 0.69


def test_tests_see_bridges_and_answer_apart():
    graph = graph_of({"A": ["B", "X"], "B": ["C"], "X": ["C"]})
    bridge = graph.node("B")
    for seed in range(20):
        walk = constrained_walk(
            graph,
            np.random.default_rng(seed),
            rules(max_retries=50),
            graph.node("A"),
            accept_bridge=lambda node: node == bridge,
            accept_answer=lambda node: node != bridge,
        )
        assert titles(graph, walk) == ["A", "B", "C"]


def test_hops_come_with_the_probabilities_asked_although_long_walks_fail_more():
    ring = {f"N{i}": [f"N{(i + 1) % 9}", "X (disambiguation)"] for i in range(9)}
    graph = graph_of(ring)
    options = WalkRules(hop_probabilities={2: 0.4, 3: 0.4, 4: 0.2}, max_retries=500)
    rng = np.random.default_rng(0)
    hops = Counter(constrained_walk(graph, rng, options, graph.node("N0")).hops for _ in range(500))
    assert hops[2] == pytest.approx(200, abs=35)
    assert hops[3] == pytest.approx(200, abs=35)
    assert hops[4] == pytest.approx(100, abs=30)


def test_relations_only_leaves_links_in_prose():
    builder = LinkGraphBuilder()
    builder.add_page("A", [Link(target="B", anchor="b", relation="seat"), Link(target="C", anchor="c")])
    builder.add_page("B", [])
    builder.add_page("C", [])
    graph = builder.build()
    for only, expected in ((True, {"B"}), (False, {"B", "C"})):
        options = rules(hop_probabilities={1: 1.0}, relations_only=only)
        walks = [constrained_walk(graph, np.random.default_rng(s), options, graph.node("A")) for s in range(20)]
        assert {titles(graph, walk)[1] for walk in walks} == expected


def test_enumeration_holds_exactly_what_can_be_drawn():
    rng = np.random.default_rng(3)
    links = {f"N{i}": [f"N{j}" for j in rng.choice(8, 3, replace=False)] for i in range(8)}
    links["N0"].append("N1 (disambiguation)")
    graph, options = graph_of(links), rules(hub_in_degree=5)
    seed = graph.node("N0")
    drawn = {constrained_walk(graph, rng, options, seed, hops=3) for _ in range(2000)} - {None}
    assert drawn == set(enumerate_walks(graph, options, seed, 3))
    last = next(iter(drawn)).nodes[-1]
    ending = list(enumerate_walks(graph, options, seed, 3, accept_answer=lambda node: node == last))
    assert {walk.nodes[-1] for walk in ending} == {last}


def test_seeds():
    graph = graph_of({"A": ["B", "C", "List of D"], "B": ["C", "List of D"], "C": ["List of D"]})
    seeds = eligible_seeds(graph, rules(), min_in_degree=1, max_in_degree=2)
    assert sorted(graph.titles[node] for node in seeds) == ["B", "C"]
    rng = np.random.default_rng(0)
    strata = {"many": list(range(10)), "one": [10], "none": []}
    counts = Counter(draw_seed(rng, strata) for _ in range(1000))
    assert counts[10] == pytest.approx(500, abs=60)
    with pytest.raises(ConfigurationError, match=r"no seed in any of the strata \['none'\]"):
        draw_seed(rng, {"none": []})


def test_rules_are_checked():
    with pytest.raises(ConfigurationError, match=r"sum to 0\.9: they must sum to 1"):
        WalkRules(hop_probabilities={2: 0.9})
    with pytest.raises(ConfigurationError, match="hops=0: must be at least 1"):
        WalkRules(hop_probabilities={0: 1.0})
    with pytest.raises(ConfigurationError, match="hub_in_degree=0"):
        WalkRules(hub_in_degree=0)
    with pytest.raises(ConfigurationError, match="max_retries=-1"):
        WalkRules(max_retries=-1)
