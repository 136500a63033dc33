"""What a run will need, from its configuration alone: parameters, memory, time."""

from opensearch_lightning.planning.clusters import CLUSTERS, Cluster
from opensearch_lightning.planning.figures import Assumptions, Figures
from opensearch_lightning.planning.memory import Memory, count_memory
from opensearch_lightning.planning.plan import Plan, make_plan
from opensearch_lightning.planning.setup import Setup, read_setup

__all__ = [
    "CLUSTERS",
    "Assumptions",
    "Cluster",
    "Figures",
    "Memory",
    "Plan",
    "Setup",
    "count_memory",
    "make_plan",
    "read_setup",
]
