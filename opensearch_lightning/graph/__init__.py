"""Link graphs of MediaWiki dumps and constrained walks over them."""

from opensearch_lightning.graph.dump import Page, normalize_title, read_pages
from opensearch_lightning.graph.link_graph import Link, LinkGraph, LinkGraphBuilder
from opensearch_lightning.graph.walk import (
    Rejection,
    Walk,
    WalkRules,
    constrained_walk,
    draw_seed,
    eligible_seeds,
    enumerate_walks,
)

__all__ = [
    "Link",
    "LinkGraph",
    "LinkGraphBuilder",
    "Page",
    "Rejection",
    "Walk",
    "WalkRules",
    "constrained_walk",
    "draw_seed",
    "eligible_seeds",
    "enumerate_walks",
    "normalize_title",
    "read_pages",
]
