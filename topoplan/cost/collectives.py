"""Seconds of a collective, from the links that its group really crosses.

Ring costs: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
section 4; NCCL's bus bandwidth as defined in nccl-tests `doc/PERFORMANCE.md`. The other groups of the same kind run at
the same time, so a node's NICs are shared by all its GPUs.
"""

from __future__ import annotations

from functools import lru_cache

from topoplan.cost.profile import Profile
from topoplan.layout.placement import Group, span
from topoplan.specs.cluster import Cluster


@lru_cache(maxsize=256)
def nvlink_domain_size(cluster: Cluster) -> int:
    """Consecutive ranks that reach each other over NVLink.

    A job larger than an NVL72 rack is given whole segments of trays, a power of two of GPUs in each rack, by the
    schedulers that place it; rank blocks then never straddle racks. A job that one domain holds is one domain.
    """
    domain = min(cluster.nvlink_domain_gpus if cluster.nvlink_bytes_per_s else 1, cluster.world_size)
    if domain <= cluster.gpus_per_node or domain == cluster.world_size:
        return domain
    size = cluster.gpus_per_node
    while size * 2 <= domain:
        size *= 2
    return size


def _network_bytes_per_s_per_gpu(cluster: Cluster, profile: Profile) -> float:
    """One GPU's share of its node's NICs, with all GPUs of the node sending."""
    total = cluster.nics_per_node * cluster.nic_bytes_per_s / cluster.fabric.oversubscription
    return total * profile.network_efficiency / cluster.gpus_per_node


def _local_bytes_per_s(cluster: Cluster, profile: Profile) -> float:
    """One GPU's rate to others in its NVLink domain, or over PCIe in its node."""
    if cluster.nvlink_bytes_per_s:
        return cluster.nvlink_bytes_per_s * profile.nvlink_efficiency
    return cluster.pcie_bytes_per_s * profile.pcie_efficiency


@lru_cache(maxsize=1 << 14)
def ring(group: Group, cluster: Cluster, profile: Profile) -> tuple[float, float]:
    """(bytes per second and rank, latency of a whole ring pass in seconds) of a ring over a group."""
    domain = max(nvlink_domain_size(cluster), cluster.gpus_per_node)
    spread = span(group, domain)
    local = _local_bytes_per_s(cluster, profile)
    if not cluster.nvlink_bytes_per_s:
        # Groups whose members are not neighbours all cross the same host bridges, `stride` of them at a time.
        local /= group.stride if spread.domains == 1 else 1
    if spread.domains == 1:
        return local, profile.collective_latency_s + profile.hop_latency_s * (group.size - 1)
    # Every ring enters and leaves a domain once; a group's members in one domain bring their NICs along.
    between = spread.members * _network_bytes_per_s_per_gpu(cluster, profile)
    rate = between if spread.largest == 1 else min(local, between)
    # NCCL runs trees or rings with pipelined chunks: latency grows with the logarithm of the domains.
    inside = profile.hop_latency_s * (spread.largest - 1)
    return rate, profile.collective_latency_s + inside + 2 * cluster.fabric.latency_s * (
        spread.domains - 1
    ).bit_length()


def all_gather_s(group: Group, total_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """All-gather, or reduce-scatter, of a tensor that is `total_bytes` when whole."""
    if group.size == 1 or total_bytes == 0:
        return 0.0
    rate, latency_s = ring(group, cluster, profile)
    return latency_s + (group.size - 1) / group.size * total_bytes / rate


def all_reduce_s(group: Group, total_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """All-reduce of `total_bytes`: a reduce-scatter and an all-gather."""
    if group.size == 1 or total_bytes == 0:
        return 0.0
    rate, latency_s = ring(group, cluster, profile)
    return latency_s + 2 * (group.size - 1) / group.size * total_bytes / rate


@lru_cache(maxsize=1 << 14)
def _all_to_all_rates(group: Group, cluster: Cluster, profile: Profile) -> tuple[float, float]:
    """(seconds a byte that every rank sends, latency in seconds)."""
    domain = max(nvlink_domain_size(cluster), cluster.gpus_per_node)
    spread = span(group, domain)
    inside = (spread.largest - 1) / group.size / _local_bytes_per_s(cluster, profile)
    if spread.domains == 1:
        return inside, profile.collective_latency_s
    outside = (group.size - spread.members) / group.size / _network_bytes_per_s_per_gpu(cluster, profile)
    return max(inside, outside), profile.collective_latency_s + cluster.fabric.latency_s * spread.domains


def all_to_all_s(group: Group, sent_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """All-to-all in which every rank holds `sent_bytes`, spread evenly over the members, itself included."""
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    per_byte, latency_s = _all_to_all_rates(group, cluster, profile)
    return latency_s + sent_bytes * per_byte


@lru_cache(maxsize=1 << 14)
def _neighbour(group: Group, cluster: Cluster, profile: Profile) -> tuple[float, float]:
    """(bytes per second, latency in seconds) between neighbours of a group, where they are farthest apart."""
    spread = span(group, max(nvlink_domain_size(cluster), cluster.gpus_per_node))
    if spread.domains == 1:
        return _local_bytes_per_s(cluster, profile), profile.collective_latency_s
    # Only the last member in a domain sends out of it: it has the share of all members, up to its own NICs' rate.
    share = _network_bytes_per_s_per_gpu(cluster, profile)
    own = share * max(1.0, cluster.gpus_per_node / cluster.nics_per_node)
    return min(spread.members * share, own), profile.collective_latency_s + cluster.fabric.latency_s


def point_to_point_s(group: Group, sent_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """One message from every member of a group to the next: the slowest of them, which may leave the node."""
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    rate, latency_s = _neighbour(group, cluster, profile)
    return latency_s + sent_bytes / rate
