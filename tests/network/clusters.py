"""Clusters of catalog GPUs with fabrics of all kinds, for tests of the topology."""

from dataclasses import replace
from typing import Any

from tests.engines.samples import spec_of
from topoplan.specs.cluster import Cluster


def cluster_of(gpu: str = "h100-sxm-80gb", *, nodes: int = 4, gpus_per_node: int = 8, **changes: Any) -> Cluster:
    """Return a cluster of the usual machines of a GPU; `changes` are fields of Fabric or of Cluster."""
    cluster = spec_of(gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node).cluster
    of_fabric = {key: changes.pop(key) for key in list(changes) if hasattr(cluster.fabric, key)}
    return replace(cluster, fabric=replace(cluster.fabric, **of_fabric), **changes)
