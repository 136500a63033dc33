"""Setups to count, from the configurations that ship."""

from opensearch_lightning.composition import compose_config
from opensearch_lightning.planning import Plan, Setup, make_plan, read_setup
from opensearch_lightning.planning.clusters import find_cluster
from opensearch_lightning.planning.figures import Assumptions, Figures


def setup_of(*overrides: str) -> Setup:
    """What a composed configuration says."""
    return read_setup(compose_config(overrides))


def plan_of(*overrides: str, cluster: str = "h20") -> Plan:
    """The plan of a composed configuration, with the recipe's figures."""
    return make_plan(setup_of(*overrides), Figures(), find_cluster(cluster), Assumptions())
