"""The route of a message from one rank to another.

A message that leaves its NVLink domain goes through the NICs nearest to its destination's GPU, and on the sending side
through NICs of the same rail. A GPU whose own NIC is on another rail passes the message over NVLink to the GPU beside
the right NIC: NCCL's PXN, enabled by default since NCCL 2.12 (`graph/paths.cc`, NCCL_PXN_DISABLE), which keeps the
message on its rail. Without NVLink there is no PXN, and the message crosses the spine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from topoplan.network.topology import FABRIC_KINDS, HOST_KINDS, Link, Wiring, cluster_graph, local_ranks
from topoplan.specs.cluster import Cluster

if TYPE_CHECKING:
    import networkx as nx


class Route(NamedTuple):
    """The links that a message takes from one GPU to another."""

    sending: tuple[Link, ...]
    """Links of the sender's node and leaf."""
    receiving: tuple[Link, ...]
    """Links of the receiver's node and leaf, if they are not the sender's."""
    network_latency_s: float
    """Latency from NIC to NIC; 0 for a message that uses no NIC."""


class Routes:
    """Routes between ranks, read from the graph of a few nodes.

    Node 0 stands for every sender. Receivers are in node 0, in node 1 for all other nodes on the sender's leaf, and in
    the first node of the next leaf for nodes on other leaves.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._wiring = wiring = Wiring(cluster)
        self._far = wiring.nodes_per_leaf if wiring.leaf_units > 1 else 0
        self._local = local_ranks(cluster)
        self._links = cluster_graph(cluster, sorted({0, 1, self._far} & set(range(cluster.nodes)))).links
        self._routes: dict[tuple[int, int, int, bool], tuple[Route, ...]] = {}

    def between(self, source: int, target: int) -> tuple[Route, ...]:
        """Return the routes from one rank to another, each for an equal part of the message."""
        gpus, leaf_of = self._wiring.cluster.gpus_per_node, self._wiring.leaf_of
        (from_node, from_gpu), (to_node, to_gpu) = divmod(source, gpus), divmod(target, gpus)
        is_inside = source // self._local == target // self._local
        if from_node == to_node:
            node = 0
        elif is_inside or leaf_of(from_node) == leaf_of(to_node):
            node = 1
        else:
            node = self._far
        key = from_gpu, to_gpu, node, is_inside
        if key not in self._routes:
            stops = [self._inside(*key[:3])] if is_inside else self._over_nics(*key[:3])
            self._routes[key] = tuple(map(self._route, stops))
        return self._routes[key]

    def _inside(self, source: int, target: int, node: int) -> list[str]:
        """Return the stops on the way to a GPU of the same domain, which without NVLink is a node."""
        switch = ["domain0.nvswitch"] if self._wiring.has_nvlink else []
        return [f"node0.gpu{source}", *switch, f"node{node}.gpu{target}"]

    def _over_nics(self, source: int, target: int, node: int) -> Iterator[list[str]]:
        """Yield the stops of each route to a GPU of another domain."""
        wiring = self._wiring
        for from_nic, to_nic in wiring.nic_pairs(source, target):
            is_near = node != self._far and wiring.plane_of(from_nic) == wiring.plane_of(to_nic)
            spine = [] if is_near else ["spine"]
            yield [*self._to_nic(0, source, from_nic), *spine, *reversed(self._to_nic(node, target, to_nic))]

    def _to_nic(self, node: int, gpu: int, nic: int) -> list[str]:
        """Return a GPU and a NIC of its node, and between them the GPU that forwards over NVLink, if there is one."""
        wiring, switch = self._wiring, self._wiring.switch_of_nic(nic)
        ends = f"node{node}.gpu{gpu}", f"node{node}.nic{nic}"
        if not wiring.has_nvlink or wiring.switch_of_gpu(gpu) == switch:
            return list(ends)
        beside = wiring.gpus_on(switch)
        proxy = next((one for one in beside if nic in wiring.nics_of(one)), beside[0])
        return [ends[0], f"domain{wiring.domain_of(node)}.nvswitch", f"node{node}.gpu{proxy}", ends[1]]

    def _route(self, stops: Sequence[str]) -> Route:
        path = [stops[0], *(vertex for one, other in pairwise(stops) for vertex in self._way(one, other))]
        links = [self._links[one][other] for one, other in pairwise(path)]
        return Route(
            sending=tuple(link for link in links if link.owner in ("node0", "leaf0")),
            receiving=tuple(link for link in links if link.owner not in ("node0", "leaf0")),
            network_latency_s=sum(link.latency_s for link in links if link.kind in FABRIC_KINDS),
        )

    def _way(self, one: str, other: str) -> list[str]:
        """Return the vertices after one stop, up to and including the next.

        Two stops that are joined, or connected to the same switch, need no search. With NVLink all stops are so, which
        saves a ranking the import of networkx: 0.1 s, and 12 MB of memory.
        """
        if other in self._links[one]:
            return [other]
        if shared := self._links[one].keys() & self._links[other].keys():
            return [min(shared), other]
        import networkx as nx

        return nx.shortest_path(self._host, one, other)[1:]

    @cached_property
    def _host(self) -> nx.DiGraph[str]:
        """The graph that joins the GPUs and NICs of a node without NVLink: PCIe and CPUs."""
        import networkx as nx

        edges = ((one, other, link) for one, links in self._links.items() for other, link in links.items())
        return nx.DiGraph((one, other) for one, other, link in edges if link.kind in HOST_KINDS)


@lru_cache(maxsize=64)
def routes_of(cluster: Cluster) -> Routes:
    """Return the routes of a cluster, cached."""
    return Routes(cluster)
