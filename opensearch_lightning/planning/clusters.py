"""What the machines can do, as their makers say: one table, and where each figure is from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of eight GPUs of one kind.

    Attributes:
        name: as on the command line.
        flops: bfloat16 matrix operations of a GPU per second, dense.
        memory: of a GPU, bytes.
        bandwidth: of that memory, bytes per second.
        nvlink: of a GPU to the others of its node, bytes per second in one direction.
        network: of a node to the other nodes, bytes per second in one direction.
        source: where the figures are from.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    source: str


_PORTS = "network: eight ports of 400 Gb/s, as in NVIDIA's reference architecture"
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            name="h20",
            flops=148e12,
            memory=96e9,
            bandwidth=4.0e12,
            nvlink=450e9,
            network=200e9,
            source="NVIDIA H20 specification (148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s both ways); network: an "
            "assumption, four ports of 400 Gb/s, as the paper names none",
        ),
        Cluster(
            name="h100",
            flops=989e12,
            memory=80e9,
            bandwidth=3.35e12,
            nvlink=450e9,
            network=400e9,
            source=f"NVIDIA H100 SXM data sheet; {_PORTS}",
        ),
        Cluster(
            name="h200",
            flops=989e12,
            memory=141e9,
            bandwidth=4.8e12,
            nvlink=450e9,
            network=400e9,
            source=f"NVIDIA H200 SXM data sheet; {_PORTS}",
        ),
        Cluster(
            name="h800",
            flops=989e12,
            memory=80e9,
            bandwidth=3.35e12,
            nvlink=200e9,
            network=400e9,
            source="NVIDIA H800 SXM: an H100 with NVLink of 400 GB/s both ways (DeepSeek-V3, arXiv 2412.19437); "
            "network: eight ports of 400 Gb/s, as there",
        ),
        Cluster(
            name="a100",
            flops=312e12,
            memory=80e9,
            bandwidth=2.039e12,
            nvlink=300e9,
            network=200e9,
            source="NVIDIA A100 80 GB SXM data sheet; network: eight ports of 200 Gb/s, as in the DGX A100",
        ),
    )
}
"""Clusters by name. Memory is taken in decimal gigabytes, a few per cent less than a driver reports."""


def find_cluster(name: str) -> Cluster:
    """A cluster of the table.

    Raises:
        ConfigurationError: a name that is not in it.
    """
    if name.lower() in CLUSTERS:
        return CLUSTERS[name.lower()]
    close = difflib.get_close_matches(name.lower(), CLUSTERS, n=1)
    near = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"there is no cluster {name!r}{near}; choose one of: {', '.join(CLUSTERS)}")
