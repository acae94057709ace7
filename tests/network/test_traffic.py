"""Loads on links: worked out by hand, and compared with every message of the world routed over the whole graph."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

import networkx as nx
import pytest

from tests.network.clusters import cluster_of
from tests.sizes import examples
from topoplan.network.placement import Group, first_ranks
from topoplan.network.topology import FABRIC_KINDS, HOST_KINDS, Wiring, cluster_graph, local_ranks
from topoplan.network.traffic import MESSAGES, LinkLoads, LoadedLink, Pattern, _two_trees, _window, traffic, worst_group
from topoplan.specs.cluster import Cluster

PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
CASES = examples(120)
Rates = dict[str, float]


def rates(links: tuple[LoadedLink, ...]) -> Rates:
    return {one.kind: one.member_bytes_per_s for one in links}


class WholeGraph:
    """Counts every message of every group, link by link, over the graph of all nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.wiring = cluster, Wiring(cluster)
        adjacent = cluster_graph(cluster).links
        self.links = {(one, other): link for one, links in adjacent.items() for other, link in links.items()}
        self.host, self.fabric = (
            nx.DiGraph(ends for ends, link in self.links.items() if link.kind in kinds)
            for kinds in (HOST_KINDS, FABRIC_KINDS)
        )

    def _gpu(self, rank: int) -> str:
        node, gpu = divmod(rank, self.cluster.gpus_per_node)
        return f"node{node}.gpu{gpu}"

    def _to_nic(self, rank: int, nic: int) -> list[str]:
        """Return the way to a NIC of the node: over PCIe, or over NVLink to the GPU on the NIC's switch."""
        wiring, gpus = self.wiring, self.cluster.gpus_per_node
        node, gpu = divmod(rank, gpus)
        target = f"node{node}.nic{nic}"
        if not wiring.has_nvlink or wiring.switch_of_gpu(gpu) == wiring.switch_of_nic(nic):
            return nx.shortest_path(self.host, self._gpu(rank), target)
        beside = wiring.gpus_on(wiring.switch_of_nic(nic))
        proxy = ([one for one in beside if nic in wiring.nics_of(one)] or beside)[0]
        switch = f"domain{wiring.domain_of(node)}.nvswitch"
        return [self._gpu(rank), switch, *nx.shortest_path(self.host, f"node{node}.gpu{proxy}", target)]

    def _paths(self, source: int, target: int) -> Iterator[list[str]]:
        local, gpus = local_ranks(self.cluster), self.cluster.gpus_per_node
        ends = (self._gpu(source), self._gpu(target))
        if source // local != target // local:
            for from_nic, to_nic in self.wiring.nic_pairs(source % gpus, target % gpus):
                up, down = self._to_nic(source, from_nic), self._to_nic(target, to_nic)[::-1]
                yield [*up, *nx.shortest_path(self.fabric, up[-1], down[0])[1:-1], *down]
        elif self.wiring.has_nvlink:
            yield [ends[0], f"domain{source // local}.nvswitch", ends[1]]
        else:
            yield nx.shortest_path(self.host, *ends)

    def rates(self, shape: Group, pattern: Pattern) -> tuple[Rates, Rates]:
        """Return (inside, between): for each kind, the rate at which the worst link lets the pattern run."""
        loads: dict[tuple[str, str], float] = defaultdict(float)
        crossed: tuple[set[tuple[str, str]], set[tuple[str, str]]] = (set(), set())
        local = local_ranks(self.cluster)
        for first in first_ranks(shape, self.cluster.world_size):
            for source, target, load in MESSAGES[pattern](shape.ranks(first), local):
                paths = list(self._paths(source, target))
                for edge in (edge for path in paths for edge in pairwise(path)):
                    loads[edge] += load / len(paths)
                    crossed[source // local != target // local].add(edge)
        found: tuple[Rates, Rates] = ({}, {})
        for edges, by_kind in zip(crossed, found, strict=True):
            for edge in edges:
                link = self.links[edge]
                by_kind[link.kind] = min(link.rate_bytes_per_s / loads[edge], by_kind.get(link.kind, math.inf))
        return found


def sampled_cases() -> list[tuple[Cluster, Group]]:
    """Clusters with and without NVLink, racks, NICs, rails and leaves in all numbers, and shapes that fit the world."""
    rng = random.Random(7)
    cases = []
    while len(cases) < CASES:
        has_nvlink = rng.random() < 0.7
        gpus, nodes = rng.choice([1, 2, 4, 7, 8, 8]), rng.choice([1, 2, 3, 4, 6, 8, 12, 20])
        nics = rng.choice([1, 2, 3, 4, 8, 16])
        domain = gpus * rng.choice([1, 1, 2, 4]) if has_nvlink else 1
        cluster = cluster_of(
            "h100-sxm-80gb" if has_nvlink else "a100-pcie-80gb",
            nodes=nodes,
            gpus_per_node=gpus,
            nics_per_node=nics,
            sockets=rng.choice([1, 2]),
            nvlink_domain_gpus=min(domain, nodes * gpus),
            rails=rng.choice([None, None, *(n for n in range(1, nics + 1) if nics % n == 0)]),
            nodes_per_leaf=rng.choice([None, None, 1, 2, 3, 4, 8]),
            oversubscription=rng.choice([1.0, 1.0, 2.0, 3.0]),
        )
        world = cluster.world_size
        sizes = [n for n in range(2, world + 1) if world % n == 0]
        if not sizes:
            continue
        size = rng.choice(sizes)
        stride = rng.choice([n for n in range(1, world // size + 1) if world // size % n == 0])
        cases.append((cluster, Group(size, stride)))
    return cases


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_window_of_ranks_has_the_loads_of_the_whole_world(pattern: Pattern) -> None:
    checked = 0
    for cluster, shape in sampled_cases():
        if pattern == "all-to-all" and shape.size > 64:
            continue
        found = traffic(shape, pattern, cluster)
        for ours, theirs in zip((found.inside, found.between), WholeGraph(cluster).rates(shape, pattern), strict=True):
            assert rates(ours) == pytest.approx(theirs), (shape, cluster)
        checked += 1
    assert checked > CASES * 2 // 3


@pytest.mark.parametrize("pattern", ["ring", "neighbour"])
@pytest.mark.parametrize("shape", [Group(64, 8), Group(256, 2), Group(4, 128), Group(32, 16)])
def test_the_window_of_a_large_cluster_is_small(pattern: Pattern, shape: Group) -> None:
    cluster = cluster_of(nodes=64, rails=8, nodes_per_leaf=8, oversubscription=2.0)
    window, firsts = _window(shape, pattern, cluster)
    assert len(firsts) * window.size < cluster.world_size
    assert rates(traffic(shape, pattern, cluster).between) == pytest.approx(
        WholeGraph(cluster).rates(shape, pattern)[1]
    )


def only(found: LinkLoads, kind: str) -> LoadedLink:
    (one,) = [one for one in (*found.inside, *found.between) if one.kind == kind]
    return one


def test_a_ring_inside_a_box_loads_every_nvlink_once() -> None:
    found = traffic(Group(8, 1), "ring", cluster_of())
    assert found.between == ()
    assert (only(found, "nvlink").load, only(found, "nvlink").messages) == (1.0, 1)


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_members_of_a_node_bring_a_nic_each(members: int) -> None:
    found = traffic(Group(4 * members, 8 // members), "ring", cluster_of())
    assert only(found, "nic").member_bytes_per_s == pytest.approx(members * 50e9)


def test_eight_rings_share_one_nic() -> None:
    nic = only(traffic(Group(4, 8), "ring", cluster_of(nics_per_node=1)), "nic")
    assert (nic.load, nic.messages) == (8.0, 8)


def test_a_lone_sender_has_its_nic_to_itself() -> None:
    found = traffic(Group(32, 1), "neighbour", cluster_of(nics_per_node=1))
    assert only(found, "nic").member_bytes_per_s == pytest.approx(50e9)


def test_rings_of_a_rail_optimised_fabric_leave_the_spine_alone() -> None:
    cluster = cluster_of(nodes=8, rails=8)
    for shape in (Group(8, 8), Group(16, 4), Group(64, 1)):
        assert "uplink" not in rates(traffic(shape, "ring", cluster).between)
    assert "nvlink" in rates(traffic(Group(64, 1), "all-to-all", cluster).between)


def test_distant_pairs_share_the_uplinks_of_their_leaf() -> None:
    found = traffic(Group(2, 32), "neighbour", cluster_of(nodes=8, nodes_per_leaf=4, oversubscription=4.0))
    assert only(found, "uplink").member_bytes_per_s == pytest.approx(50e9 / 4)
    assert found.tightest == only(found, "uplink")


def test_pcie_groups_that_straddle_sockets_share_the_link_between_them() -> None:
    cluster = cluster_of("a100-pcie-80gb", nodes=1)
    assert only(traffic(Group(8, 1), "ring", cluster), "socket").messages == 1
    assert only(traffic(Group(2, 4), "ring", cluster), "socket").messages == 4
    assert "socket" not in rates(traffic(Group(4, 1), "ring", cluster).inside)


def test_an_all_to_all_keeps_a_part_at_home() -> None:
    found = traffic(Group(16, 1), "all-to-all", cluster_of(nodes=2))
    assert only(found, "nic").load == pytest.approx(8 / 16)
    assert [one.load for one in found.inside if one.kind == "nvlink"] == pytest.approx([7 / 16])


def test_the_ends_of_a_pipeline_are_pairs_that_fit_into_the_world() -> None:
    found = traffic(Group(2, 6), "ring", cluster_of("a100-pcie-80gb", nodes=1))
    assert found.between == ()
    assert only(found, "socket").messages == 2


def test_a_group_of_one_crosses_nothing() -> None:
    assert traffic(Group(1, 8), "ring", cluster_of()) == LinkLoads((), (), 0.0)


def test_the_worst_group_is_the_one_that_leaves_its_node() -> None:
    cluster = cluster_of(nodes=3, gpus_per_node=7)
    first, loads = worst_group(Group(3, 1), "ring", cluster)
    assert list(Group(3, 1).ranks(first)) == [6, 7, 8]
    assert loads.between
    assert worst_group(Group(7, 1), "ring", cluster)[0] == 0


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 31])
def test_both_trees_reach_every_domain_and_no_domain_is_inside_both(size: int) -> None:
    edges = list(_two_trees(size))
    for tree in (edges[::2], edges[1::2]):
        assert len(tree) == size - 1
        assert nx.is_tree(nx.Graph(tree))
        assert {child for child, _ in tree} | {parent for _, parent in tree} == set(range(size))
    children: dict[int, int] = defaultdict(int)
    for _, parent in edges:
        children[parent] += 1
    assert max(children.values()) <= 3


def test_rings_leave_a_domain_where_they_enter_the_next_and_carry_a_part_each() -> None:
    messages = {(here, there): load for here, there, load in MESSAGES["ring"](range(8), 4)}
    assert messages[0, 4] == messages[4, 0] == messages[3, 7] == 1 / 4
    assert messages[0, 1] == 3 / 4  # not of the ring that begins its way at rank 1


def test_an_all_to_all_sends_equal_parts_and_neighbours_everything() -> None:
    exchanged = list(MESSAGES["all-to-all"]([2, 4, 6], 8))
    assert len(exchanged) == 6
    assert {load for _, _, load in exchanged} == {1 / 3}
    assert list(MESSAGES["neighbour"]([2, 4, 6], 8)) == [(2, 4, 1.0), (4, 6, 1.0), (6, 2, 1.0)]
