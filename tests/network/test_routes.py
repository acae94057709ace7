"""Routes between ranks: link by link, and when networkx is imported for them."""

import subprocess
import sys

import pytest

from tests.network.clusters import cluster_of
from topoplan.network.routes import Route, Routes
from topoplan.specs.cluster import Cluster

PCIE_BOXES = cluster_of("a100-pcie-80gb", nodes=4, nics_per_node=2, rails=2)


def names(route: Route) -> list[str]:
    return [link.name for link in (*route.sending, *route.receiving)]


def only(cluster: Cluster, source: int, target: int) -> Route:
    (route,) = Routes(cluster).between(source, target)
    return route


def test_nvlink_is_the_way_inside_a_box_and_inside_a_rack() -> None:
    assert names(only(cluster_of(), 0, 5)) == ["gpu0>nvswitch", "nvswitch>gpu5"]
    rack = only(cluster_of("gb200-nvl72-186gb", nodes=18, gpus_per_node=4), 0, 8)
    assert names(rack) == ["gpu0>nvswitch", "nvswitch>gpu0"]
    assert [link.name for link in rack.receiving] == ["nvswitch>gpu0"]


def test_with_nvlink_a_message_stays_in_its_rail_over_the_gpu_beside_the_nic() -> None:
    route = only(cluster_of(nodes=4, rails=8), 0, 8 + 5)
    assert [link.name for link in route.sending] == [
        "gpu0>nvswitch", "nvswitch>gpu5", "gpu5>pcie2", "pcie2>nic5", "nic5>plane5",
    ]  # fmt: skip
    assert [link.name for link in route.receiving] == ["plane5>nic5", "nic5>pcie2", "pcie2>gpu5"]


def test_a_gpu_reaches_a_nic_on_its_own_switch_directly() -> None:
    assert names(only(cluster_of(nodes=2, rails=8), 0, 8 + 1))[:2] == ["gpu0>pcie0", "pcie0>nic1"]


def test_without_nvlink_the_way_is_over_the_cpus_and_other_rails_are_across_the_spine() -> None:
    assert names(only(PCIE_BOXES, 0, 7)) == ["gpu0>pcie0", "pcie0>cpu0", "cpu0>cpu1", "cpu1>pcie1", "pcie1>gpu7"]
    assert names(only(PCIE_BOXES, 0, 8 + 7)) == [
        "gpu0>pcie0", "pcie0>nic0", "nic0>plane0", "plane0>spine",
        "spine>plane1", "plane1>nic1", "nic1>pcie1", "pcie1>gpu7",
    ]  # fmt: skip


def test_a_gpu_with_several_nics_sends_a_part_over_each() -> None:
    routes = Routes(cluster_of(nodes=2, gpus_per_node=4, nics_per_node=8)).between(1, 4 + 1)
    assert [one.sending[-1].name for one in routes] == ["nic2>plane0", "nic3>plane0"]


def test_the_fabric_takes_its_latency_from_nic_to_nic() -> None:
    cluster = cluster_of(nodes=4, nodes_per_leaf=2)
    near, far = only(cluster, 0, 8), only(cluster, 0, 16)
    assert only(cluster, 0, 1).network_latency_s == 0
    assert near.network_latency_s == pytest.approx(cluster.fabric.latency_s)
    assert far.network_latency_s > near.network_latency_s
    assert [link.kind for link in (*far.sending, *far.receiving)][-6:-2] == ["nic", "uplink", "uplink", "nic"]


def test_machines_with_nvlink_are_routed_without_importing_networkx() -> None:
    script = """
import sys
from tests.network.clusters import cluster_of
from topoplan.network.routes import Routes
for cluster in (cluster_of(nodes=4, rails=8, nodes_per_leaf=2), cluster_of(nodes=4, nics_per_node=1)):
    routes = Routes(cluster)
    for target in range(1, 32):
        routes.between(0, target)
assert "networkx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
