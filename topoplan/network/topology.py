"""The machines and the network of a cluster as a graph: what is connected to what, and how fast.

GPUs are connected to an NVSwitch (one vertex for all planes of a machine or a rack) and to PCIe switches, PCIe switches
to CPU sockets; NICs are connected to the PCIe switches and to the leaf switches; a spine joins the leaves. Links are
one-way. All nodes are alike, so the graph of a few nodes is enough for the whole cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple, get_args

from topoplan.specs.cluster import Cluster

LinkKind = Literal["nvlink", "pcie", "bridge", "socket", "nic", "uplink"]
"""GPU to NVSwitch; GPU or NIC to PCIe switch; PCIe switch to CPU; CPU to CPU; NIC to leaf switch; leaf to spine."""
KINDS: tuple[LinkKind, ...] = get_args(LinkKind)
HOST_KINDS: tuple[LinkKind, ...] = ("pcie", "bridge", "socket")
FABRIC_KINDS: tuple[LinkKind, ...] = ("nic", "uplink")

SOCKET_BYTES_PER_S = ((16e9, 13.8e9), (33e9, 17e9), (math.inf, 30.4e9))
"""(fastest PCIe link of a GPU, rate that GPUs reach between two CPU sockets with many concurrent flows), in bytes per
second each way. The rate is far below that of the link itself, because GPUs reach each other through the CPUs. PCIe 4:
SimuMax measured 16.5 GB/s for an all-to-all of eight on an eight-GPU A100 machine, and on average 12.3, 14.7 and 15.8
GB/s for all-gathers and reduce-scatters of one, two and four concurrent flows (`configs/system/a100_pcie.json`:
collectives of eight, dp_fixed_bw). PCIe 3 and 5: what NCCL assumes for one flow over their CPUs (`graph/topo.h`:
SKL_QPI_BW, SRP_QPI_BW), scaled up by the same ratio."""
LONE_FLOW = 0.38
"""Between the sockets, n flows together reach n / (n + LONE_FLOW) of `SOCKET_BYTES_PER_S`. From the same
measurements."""

# Orders of magnitude per hop. They are negligible beside the microseconds of software per hop: the latency of a
# collective is the profile's, plus that of the fabric.
_LATENCY_S: dict[LinkKind, float] = {"nvlink": 3e-7, "pcie": 3.5e-7, "bridge": 5e-7, "socket": 5e-7, "uplink": 3e-7}

_PCIE_5_BYTES_PER_S = 63e9
"""Sixteen lanes, each way."""
_NVLINK_BOX_GPUS_PER_SWITCH = 2
"""HGX boards: four PCIe switches, each with two GPUs and their NICs."""
_PCIE_BOX_GPUS_PER_SWITCH = 4
"""Servers for eight PCIe cards: one switch with four cards on each socket."""


class Link(NamedTuple):
    """A one-way edge of the graph."""

    name: str
    """The ends of the link inside its node or leaf; equal for all nodes, or all leaves."""
    kind: LinkKind
    rate_bytes_per_s: float
    latency_s: float
    owner: str
    """The node or leaf that the link belongs to: `node0`, `leaf2`."""


@lru_cache(maxsize=256)
def nvlink_domain_size(cluster: Cluster) -> int:
    """Return the number of consecutive ranks that reach each other over NVLink.

    A job larger than an NVL72 rack gets whole racks if its size is a multiple of a rack. Otherwise schedulers give it
    segments of trays with a power of two of GPUs in each rack, so that blocks of ranks never straddle racks. A job that
    one domain can hold is one domain.
    """
    domain = min(cluster.nvlink_domain_gpus if cluster.nvlink_bytes_per_s else 1, cluster.world_size)
    if domain <= cluster.gpus_per_node or cluster.world_size % domain == 0:
        return domain
    size = cluster.gpus_per_node
    while size * 2 <= domain:
        size *= 2
    return size


def local_ranks(cluster: Cluster) -> int:
    """Return the number of ranks that reach each other without the network: those of an NVLink domain, or a node."""
    return max(nvlink_domain_size(cluster), cluster.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which device is connected to which. Indexes count inside a node, except those of nodes, domains and leaves."""

    cluster: Cluster

    @property
    def has_nvlink(self) -> bool:
        """Whether an NVSwitch joins the GPUs of a node."""
        return self.cluster.nvlink_bytes_per_s > 0

    @property
    def switches(self) -> int:
        """PCIe switches per node."""
        gpus = self.cluster.gpus_per_node
        each = _NVLINK_BOX_GPUS_PER_SWITCH if self.has_nvlink else _PCIE_BOX_GPUS_PER_SWITCH
        return min(gpus, max(self.cluster.sockets, -(-gpus // each)))

    @property
    def sockets(self) -> int:
        """CPU sockets per node that have PCIe switches."""
        return min(self.cluster.sockets, self.switches)

    @property
    def planes(self) -> int:
        """Number of leaf planes, or rails."""
        return self.cluster.fabric.rails or 1

    @property
    def nodes_per_leaf(self) -> int:
        """Nodes per leaf. If the spec does not say: all nodes, or one if the leaves are oversubscribed."""
        fabric = self.cluster.fabric
        return fabric.nodes_per_leaf or (1 if fabric.oversubscription > 1 else self.cluster.nodes)

    @property
    def leaf_units(self) -> int:
        """Leaf switches in one plane."""
        return -(-self.cluster.nodes // self.nodes_per_leaf)

    def switch_of_gpu(self, gpu: int) -> int:
        """Return the PCIe switch of a GPU."""
        return gpu * self.switches // self.cluster.gpus_per_node

    def gpus_on(self, switch: int) -> list[int]:
        """Return the GPUs on a PCIe switch."""
        return [gpu for gpu in range(self.cluster.gpus_per_node) if self.switch_of_gpu(gpu) == switch]

    def switch_of_nic(self, nic: int) -> int:
        """Return the PCIe switch of a NIC."""
        return nic * self.switches // self.cluster.nics_per_node

    def nics_on(self, switch: int) -> list[int]:
        """Return the NICs on a PCIe switch; a single machine has none."""
        nics = self.cluster.nics_per_node if self.cluster.nodes > 1 else 0
        return [nic for nic in range(nics) if self.switch_of_nic(nic) == switch]

    def socket_of_switch(self, switch: int) -> int:
        """Return the CPU socket of a PCIe switch."""
        return switch * self.sockets // self.switches

    def nics_of(self, gpu: int) -> range:
        """Return the NICs that a GPU's own traffic uses: the nearest, or several if NICs outnumber GPUs."""
        gpus, nics = self.cluster.gpus_per_node, self.cluster.nics_per_node
        first = gpu * nics // gpus
        return range(first, max(first + 1, (gpu + 1) * nics // gpus))

    def plane_of(self, nic: int) -> int:
        """Return the leaf plane of a NIC."""
        return nic % self.planes

    def leaf_of(self, node: int) -> int:
        """Return the leaf of a node, as an index within a plane."""
        return node // self.nodes_per_leaf

    def domain_of(self, node: int) -> int:
        """Return the NVLink domain of a node."""
        return node * self.cluster.gpus_per_node // local_ranks(self.cluster)

    def nic_pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        """Return the (sending NIC, receiving NIC) pairs of a message between domains, each with an equal part of it."""
        own = self.nics_of(source)
        pairs = []
        for position, nic in enumerate(self.nics_of(target)):
            mine = own[position % len(own)]
            same_rail = self.plane_of(mine) == self.plane_of(nic)
            pairs.append((mine if same_rail or not self.has_nvlink else nic, nic))
        return pairs


def socket_bytes_per_s(cluster: Cluster) -> float:
    """Return the rate that GPUs reach over the link between two CPU sockets."""
    return next(rate for fastest_pcie, rate in SOCKET_BYTES_PER_S if cluster.pcie_bytes_per_s <= fastest_pcie)


def gpu_link_bytes_per_s(cluster: Cluster) -> float:
    """Return the PCIe rate of a GPU.

    If its NICs are faster than its link to the CPU, and there is NVLink, the NICs are on a switch of their own with the
    GPU (ConnectX-8).
    """
    wiring = Wiring(cluster)
    if not wiring.has_nvlink:
        return cluster.pcie_bytes_per_s
    return max(cluster.pcie_bytes_per_s, cluster.nic_bytes_per_s * len(wiring.nics_of(0)))


def nic_slot_bytes_per_s(cluster: Cluster) -> float:
    """Return the PCIe rate of a NIC: at most PCIe 5's, even beside NVLink-C2C, but no less than the NIC's own."""
    return max(min(cluster.pcie_bytes_per_s, _PCIE_5_BYTES_PER_S), cluster.nic_bytes_per_s)


def uplink_bytes_per_s(cluster: Cluster) -> float:
    """Return the rate of all uplinks of one leaf together, sized for a full leaf even if ports are unused."""
    wiring = Wiring(cluster)
    downlinks = wiring.nodes_per_leaf * cluster.nics_per_node / wiring.planes
    return downlinks * cluster.nic_bytes_per_s / cluster.fabric.oversubscription


@dataclass(frozen=True, slots=True)
class ClusterGraph:
    """Nodes and their network in plain dictionaries, so that not every ranking has to import networkx."""

    vertices: dict[str, str] = field(default_factory=dict)
    """The kind of each vertex: gpu, nvswitch, pcie-switch, cpu, nic, leaf or spine."""
    links: dict[str, dict[str, Link]] = field(default_factory=dict)
    """The link from one vertex to another, in both directions."""

    def join(
        self, lower: str, upper: str, kind: LinkKind, rate_bytes_per_s: float, latency_s: float | None = None
    ) -> None:
        """Add both directions of a link, which belongs to the node or leaf of its lower end."""
        owner, _, here = lower.rpartition(".")
        there = upper.rpartition(".")[2]
        latency = _LATENCY_S[kind] if latency_s is None else latency_s
        for one, other, name in ((lower, upper, f"{here}>{there}"), (upper, lower, f"{there}>{here}")):
            self.links.setdefault(one, {})[other] = Link(name, kind, rate_bytes_per_s, latency, owner)


def cluster_graph(cluster: Cluster, nodes: Iterable[int] | None = None) -> ClusterGraph:
    """Return the graph of these nodes, or of all nodes; a single machine has no network."""
    wiring, graph = Wiring(cluster), ClusterGraph()
    for node in range(cluster.nodes) if nodes is None else nodes:
        _add_node(graph, wiring, node)
        if cluster.nodes > 1:
            _add_nics(graph, wiring, node)
    return graph


def _add_node(graph: ClusterGraph, wiring: Wiring, node: int) -> None:
    """Add the GPUs, NVSwitch, PCIe switches and CPUs of one node."""
    cluster = wiring.cluster
    for gpu in range(cluster.gpus_per_node):
        name = f"node{node}.gpu{gpu}"
        graph.vertices[name] = "gpu"
        if wiring.has_nvlink:
            domain = f"domain{wiring.domain_of(node)}.nvswitch"
            graph.vertices[domain] = "nvswitch"
            graph.join(name, domain, "nvlink", cluster.nvlink_bytes_per_s)
        graph.join(name, f"node{node}.pcie{wiring.switch_of_gpu(gpu)}", "pcie", gpu_link_bytes_per_s(cluster))
    for number in range(wiring.switches):
        switch, cpu = f"node{node}.pcie{number}", f"node{node}.cpu{wiring.socket_of_switch(number)}"
        graph.vertices[switch] = "pcie-switch"
        graph.vertices[cpu] = "cpu"
        graph.join(switch, cpu, "bridge", cluster.pcie_bytes_per_s)
    for one, other in combinations(range(wiring.sockets), 2):
        graph.join(f"node{node}.cpu{one}", f"node{node}.cpu{other}", "socket", socket_bytes_per_s(cluster))


def _add_nics(graph: ClusterGraph, wiring: Wiring, node: int) -> None:
    """Add the NICs of one node, and the leaf switches that they are connected to."""
    cluster = wiring.cluster
    for nic in range(cluster.nics_per_node):
        name, leaf = f"node{node}.nic{nic}", f"leaf{wiring.leaf_of(node)}.plane{wiring.plane_of(nic)}"
        graph.vertices[name] = "nic"
        graph.join(name, f"node{node}.pcie{wiring.switch_of_nic(nic)}", "pcie", nic_slot_bytes_per_s(cluster))
        if leaf not in graph.vertices:
            graph.vertices[leaf] = "leaf"
            if wiring.leaf_units > 1 or wiring.planes > 1:
                graph.vertices["spine"] = "spine"
                graph.join(leaf, "spine", "uplink", uplink_bytes_per_s(cluster))
        # Half of the latency from NIC to NIC.
        graph.join(name, leaf, "nic", cluster.nic_bytes_per_s, cluster.fabric.latency_s / 2)
