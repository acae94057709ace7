"""The graph of a cluster: what is connected to what, and at which rate."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.network.clusters import cluster_of
from topoplan.network.topology import (
    KINDS,
    Wiring,
    cluster_graph,
    local_ranks,
    nvlink_domain_size,
    uplink_bytes_per_s,
)

PCIE_BOX = {"gpu": "a100-pcie-80gb"}
RACK = {"gpu": "gb200-nvl72-186gb", "gpus_per_node": 4}


def test_every_link_has_a_rate_and_a_latency_and_goes_both_ways_alike() -> None:
    graph = cluster_graph(cluster_of(nodes=4, rails=8, nodes_per_leaf=2))
    assert {link.kind for links in graph.links.values() for link in links.values()} == set(KINDS)
    for one, links in graph.links.items():
        for other, link in links.items():
            assert link.rate_bytes_per_s > 0
            assert link.latency_s > 0
            assert graph.links[other][one]._replace(name=link.name) == link


@pytest.mark.parametrize(
    ("cluster", "kinds"),
    [
        ({"nodes": 1}, {"gpu": 8, "nvswitch": 1, "pcie-switch": 4, "cpu": 2}),
        ({"nodes": 2}, {"gpu": 16, "nvswitch": 2, "pcie-switch": 8, "cpu": 4, "nic": 16, "leaf": 1}),
        ({**PCIE_BOX, "nodes": 1}, {"gpu": 8, "pcie-switch": 2, "cpu": 2}),
        (
            {**RACK, "nodes": 18},
            {"gpu": 72, "nvswitch": 1, "pcie-switch": 36, "cpu": 36, "nic": 72, "leaf": 1},
        ),
    ],
    ids=["alone", "two", "pcie", "rack"],
)
def test_machines_have_their_parts(cluster: dict[str, Any], kinds: dict[str, int]) -> None:
    assert Counter(cluster_graph(cluster_of(**cluster)).vertices.values()) == kinds


def test_rails_have_a_leaf_each_and_leaves_a_spine() -> None:
    graph = cluster_graph(cluster_of(nodes=4, rails=8, nodes_per_leaf=2, oversubscription=2.0))
    assert Counter(graph.vertices.values())["leaf"] == 16
    assert set(graph.links["node3.nic5"]) == {"node3.pcie2", "leaf1.plane5"}
    assert graph.links["leaf1.plane5"]["spine"].rate_bytes_per_s == 2 * 50e9 / 2


@pytest.mark.parametrize(("nodes", "domain"), [(2, 8), (18, 72), (20, 64), (36, 72), (64, 64)])
def test_a_domain_is_a_whole_rack_or_a_power_of_two_of_it(nodes: int, domain: int) -> None:
    assert nvlink_domain_size(cluster_of(**RACK, nodes=nodes)) == domain


def test_without_nvlink_a_domain_is_a_gpu_and_the_node_is_local() -> None:
    cluster = cluster_of(**PCIE_BOX, nodes=2)
    assert (nvlink_domain_size(cluster), local_ranks(cluster)) == (1, 8)


@pytest.mark.parametrize(
    ("gpus", "nics", "expected"),
    [
        (8, 8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (8, 4, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (8, 1, [[0]] * 8),
        (4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 3, [[0], [0], [0], [1], [1], [1], [2], [2]]),
        (7, 8, [[0], [1], [2], [3], [4], [5], [6, 7]]),
    ],
)
def test_a_gpu_uses_its_nearest_nics(gpus: int, nics: int, expected: list[list[int]]) -> None:
    wiring = Wiring(cluster_of(gpus_per_node=gpus, nics_per_node=nics))
    assert [list(wiring.nics_of(gpu)) for gpu in range(gpus)] == expected


def test_a_switch_has_its_gpus_and_nics() -> None:
    wiring = Wiring(cluster_of(nodes=2))
    assert [wiring.gpus_on(switch) for switch in range(wiring.switches)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [wiring.nics_on(switch) for switch in range(wiring.switches)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [wiring.socket_of_switch(switch) for switch in range(wiring.switches)] == [0, 0, 1, 1]
    assert Wiring(cluster_of(nodes=1)).nics_on(0) == []


def test_an_unknown_leaf_holds_all_nodes_unless_leaves_are_oversubscribed() -> None:
    assert Wiring(cluster_of(nodes=6)).leaf_units == 1
    assert Wiring(cluster_of(nodes=6, oversubscription=2.0)).leaf_units == 6
    assert Wiring(cluster_of(nodes=6, nodes_per_leaf=4)).leaf_units == 2


def test_a_partly_filled_leaf_has_the_uplinks_of_a_full_one() -> None:
    assert uplink_bytes_per_s(cluster_of(nodes=6, nodes_per_leaf=4, rails=8)) == 4 * 50e9


def test_a_slow_cpu_link_does_not_hold_back_a_fast_nic() -> None:
    cluster = replace(cluster_of(nodes=2), nic_bytes_per_s=100e9)
    links = cluster_graph(cluster).links["node0.pcie0"]
    assert links["node0.gpu0"].rate_bytes_per_s == links["node0.nic0"].rate_bytes_per_s == 100e9
    assert links["node0.cpu0"].rate_bytes_per_s == cluster.pcie_bytes_per_s
