"""Describe links and machines in vendors' words and units."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from topoplan.catalog.fabrics import fabric_name
from topoplan.network.topology import LinkKind, Wiring, local_ranks, socket_bytes_per_s, uplink_bytes_per_s
from topoplan.report.text import counted
from topoplan.specs.cluster import Cluster
from topoplan.units import format_bit_rate, format_byte_rate, format_seconds

LINKS: dict[LinkKind, str] = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "bridge": "PCIe to CPU",
    "socket": "CPU to CPU",
    "nic": "NIC",
    "uplink": "uplink",
}


def rate_words(kind: LinkKind, rate_bytes_per_s: float) -> str:
    """Format a link's rate: NVLink as both directions together, networks in bits, the rest in bytes one way."""
    if kind == "nvlink":
        return format_byte_rate(2 * rate_bytes_per_s)
    return (format_bit_rate if kind in ("nic", "uplink") else format_byte_rate)(rate_bytes_per_s)


def numbers(values: Iterable[int]) -> str:
    """Return `0`, `0-3`, or `0, 2` if the numbers are not consecutive."""
    found = list(values)
    if len(found) > 1 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ", ".join(map(str, found))


def domain_nodes(cluster: Cluster) -> int:
    """Return the number of nodes joined by one NVSwitch domain; 0 without NVLink."""
    return max(1, local_ranks(cluster) // cluster.gpus_per_node) if cluster.nvlink_bytes_per_s else 0


def title(cluster: Cluster) -> str:
    """Return `h100-4x8: 4 nodes x 8 h100-sxm-80gb, 32 GPUs`."""
    machines = f"{counted(cluster.nodes, 'node')} x {cluster.gpus_per_node} {cluster.gpu.name}"
    return f"{cluster.name}: {machines}, {counted(cluster.world_size, 'GPU')}"


def nvlink_words(cluster: Cluster) -> str:
    """Describe the NVLink connection of the GPUs; empty without NVLink."""
    nodes = domain_nodes(cluster)
    if not nodes:
        return ""
    reach = f", over {nodes:,} nodes" if nodes > 1 else ""
    return f"NVSwitch, {rate_words('nvlink', cluster.nvlink_bytes_per_s)} per GPU{reach}"


def sockets_words(cluster: Cluster) -> str:
    """Describe the CPU sockets, their PCIe switches and the links between them."""
    wiring = Wiring(cluster)
    by_socket = groupby(range(wiring.switches), key=wiring.socket_of_switch)
    words = [f"CPU {socket} (PCIe {numbers(switches)})" for socket, switches in by_socket]
    words.append(f"{format_byte_rate(cluster.pcie_bytes_per_s)} a switch")
    if wiring.sockets > 1:
        words.append(f"{format_byte_rate(socket_bytes_per_s(cluster))} between sockets")
    return ", ".join(words)


def leaves_words(cluster: Cluster) -> str:
    """Describe the leaf switches: how many, and the nodes on each."""
    wiring = Wiring(cluster)
    if wiring.leaf_units == 1 and not cluster.fabric.nodes_per_leaf:
        # The spec does not describe the switches, so all that is known is that no pair of nodes is slower.
        rails = f"{wiring.planes} rails, each" if wiring.planes > 1 else "one network,"
        return f"{rails} non-blocking for all nodes"
    count = wiring.leaf_units * wiring.planes
    on_each = min(wiring.nodes_per_leaf, cluster.nodes)
    each = "all nodes" if wiring.leaf_units == 1 else counted(on_each, "node")
    rails = f", {wiring.planes} rails" if wiring.planes > 1 else ""
    return f"{counted(count, 'leaf switch', 'leaf switches')}{rails}, {each} on {'it' if count == 1 else 'each'}"


def spine_words(cluster: Cluster) -> str:
    """Describe the spine and its uplinks; empty if there is only one leaf."""
    wiring = Wiring(cluster)
    if wiring.leaf_units == wiring.planes == 1:
        return ""
    ratio = f"{cluster.fabric.oversubscription:g}:1"
    blocking = "non-blocking" if cluster.fabric.oversubscription == 1 else f"{ratio} oversubscribed"
    return f"spine, {format_bit_rate(uplink_bytes_per_s(cluster))} a leaf, {blocking}"


def fabric_words(cluster: Cluster) -> str:
    """Describe the network's kind, rate and latency."""
    fabric = cluster.fabric
    nics = f"{cluster.nics_per_node} x {format_bit_rate(cluster.nic_bytes_per_s)} per node"
    return f"{fabric_name(fabric.kind)}, {nics}, {format_seconds(fabric.latency_s)} from NIC to NIC"
