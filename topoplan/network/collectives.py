"""Seconds of a collective, from the links that its group actually crosses.

Rates come from the edges of the cluster's graph and from the other traffic on them (`network/traffic.py`), times the
fraction that NCCL reaches (the profile). Of NCCL's algorithms and protocols the fastest is used, as its tuner does
(`graph/tuning.cc`, ncclTopoTuneModel and ncclTopoGetAlgoTime; NCCL 2.19 to 2.26):

- Ring: n - 1 steps for an all-gather or a reduce-scatter, twice as many for an all-reduce (Thakur, Rabenseifner and
  Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4). Groups that span nodes have
  as many rings as members per node, each with a NIC of its own.
- Tree: all-reduce only; chains inside a node, two binary trees between nodes, with log2(nodes) steps.
- NVLS: all-reduce only; NVSwitches from Hopper on reduce and multicast (NVLink SHARP). NCCL also uses it for all-gather
  and reduce-scatter, but only with registered buffers, which PyTorch does not have by default. Between domains it is
  combined with the trees.

All other groups of the same kind are assumed to communicate at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from topoplan.network.placement import Group, Span, span
from topoplan.network.topology import LONE_FLOW, local_ranks
from topoplan.network.traffic import LinkLoads, LoadedLink, traffic
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile

TCP_SOCKETS = 2
"""TCP sockets of one group over one NIC: NCCL has at least two channels, each with one thread and one socket (NCCL user
guide, NCCL_SOCKET_NTHREADS)."""


class Protocol(NamedTuple):
    """Costs of an NCCL protocol relative to Simple. LL sends flags along with the data instead of waiting."""

    rate: float
    """Bus bandwidth, relative to Simple."""
    hop: float
    """Time of a step inside a domain, relative to Simple."""
    network_hop: float
    """Software time of a step between nodes, relative to Simple."""


SIMPLE = Protocol(1.0, 1.0, 1.0)


@lru_cache(maxsize=64)
def _protocols(profile: Profile) -> tuple[Protocol, ...]:
    """Return Simple and LL, for rings; LL128 lies between them, at rates and sizes that depend on the channels."""
    return SIMPLE, Protocol(profile.ll_efficiency, profile.ll_hop_share, profile.ll_network_hop_share)


class AlgorithmCost(NamedTuple):
    """One algorithm on one group."""

    rate_bytes_per_s: float
    """Bytes per member that the algorithm moves per second."""
    start_s: float
    """Fixed cost of the collective in seconds."""
    hops_s: float = 0.0
    """Seconds of the steps of one pass inside domains, with Simple."""
    network_hops_s: float = 0.0
    """Software seconds of the steps of one pass between domains, with Simple."""
    network_s: float = 0.0
    """Network latency of the steps of one pass between domains, in seconds."""
    protocols: tuple[Protocol, ...] = (SIMPLE,)

    def latency_s(self, passes: int, protocol: Protocol = SIMPLE) -> float:
        """Return the seconds that do not depend on the size."""
        hops_s = self.hops_s * protocol.hop + self.network_hops_s * protocol.network_hop + self.network_s
        return self.start_s + passes * hops_s

    def seconds(self, moved_bytes: float, passes: int = 1) -> float:
        """Return the seconds with the protocol that is fastest for this size."""
        plain_s = moved_bytes / self.rate_bytes_per_s
        return min([self.latency_s(passes, one) + plain_s / one.rate for one in self.protocols])


def _inside_bytes_per_s(crossings: Iterable[LoadedLink], profile: Profile) -> float:
    """Return the rate of flows inside a domain: over NVLink, or over PCIe and between sockets."""
    return _slowest(crossings, profile, profile.pcie_efficiency)


def _between_bytes_per_s(crossings: Iterable[LoadedLink], members: int, cluster: Cluster, profile: Profile) -> float:
    """Return the rate of flows between domains, with `members` of a group sending from one domain."""
    rate = _slowest(crossings, profile, profile.network_efficiency)
    if cluster.fabric.kind == "ethernet":
        nics = max(1.0, members * cluster.nics_per_node / cluster.gpus_per_node)
        rate = min(rate, nics * TCP_SOCKETS * profile.tcp_socket_bytes_per_s)
    return rate


def _slowest(crossings: Iterable[LoadedLink], profile: Profile, efficiency: float) -> float:
    """Return the rate of the tightest link; between sockets, the graph's rate is what many GPU flows achieve."""

    def share(link: LoadedLink) -> float:
        if link.kind == "socket":
            return link.messages / (link.messages + LONE_FLOW)
        return profile.nvlink_efficiency if link.kind == "nvlink" else efficiency

    return min(one.member_bytes_per_s * share(one) for one in crossings)


def member_bytes_per_s(flows: LinkLoads, members: int, cluster: Cluster, profile: Profile) -> float:
    """Return the rate per member at which a pattern runs, when `members` of a group send from one domain."""
    rates = []
    if flows.inside:
        rates.append(_inside_bytes_per_s(flows.inside, profile))
    if flows.between:
        rates.append(_between_bytes_per_s(flows.between, members, cluster, profile))
    return min(rates)


def _spread(group: Group, flows: LinkLoads, cluster: Cluster) -> Span:
    """Return the spread of a group over domains; one domain if no group of its kind leaves one."""
    return span(group, local_ranks(cluster)) if flows.between else Span(1, group.size, group.size)


@lru_cache(maxsize=1 << 14)
def ring_cost(group: Group, cluster: Cluster, profile: Profile) -> AlgorithmCost:
    """Return the cost of rings over a group; a pass is once around."""
    flows = traffic(group, "ring", cluster)
    spread = _spread(group, flows, cluster)
    rate = member_bytes_per_s(flows, spread.members, cluster, profile)
    between = spread.domains - 1
    return AlgorithmCost(
        rate_bytes_per_s=rate,
        start_s=profile.collective_latency_s,
        hops_s=profile.hop_latency_s * (group.size - 1 - between),
        network_hops_s=profile.network_hop_latency_s * between,
        network_s=flows.latency_s * between,
        protocols=_protocols(profile),
    )


@lru_cache(maxsize=1 << 14)
def tree_cost(group: Group, cluster: Cluster, profile: Profile) -> AlgorithmCost:
    """Return the cost of trees over several domains (a pass is up or down), with NVLS or chains inside."""
    flows = traffic(group, "tree", cluster)
    spread = _spread(group, flows, cluster)
    rates = [profile.tree_efficiency * _between_bytes_per_s(flows.between, spread.members, cluster, profile)]
    has_nvls = _has_nvls(cluster, profile) and spread.members > 1
    if has_nvls:
        rates.append(_nvls_bytes_per_s(cluster, profile))
    elif flows.inside:
        rates.append(profile.tree_efficiency * _inside_bytes_per_s(flows.inside, profile))
    steps = (spread.domains - 1).bit_length()
    return AlgorithmCost(
        rate_bytes_per_s=min(rates),
        start_s=profile.collective_latency_s + (profile.nvls_latency_s if has_nvls else 0.0),
        hops_s=0.0 if has_nvls else profile.hop_latency_s * (spread.largest - 1),
        network_hops_s=profile.network_hop_latency_s * steps,
        network_s=flows.latency_s * steps,
        protocols=(SIMPLE,) if has_nvls else _protocols(profile),
    )


@lru_cache(maxsize=1 << 14)
def nvls_cost(cluster: Cluster, profile: Profile) -> AlgorithmCost:
    """Return the cost of NVLS inside one domain: NVSwitches reduce and multicast."""
    rate = _nvls_bytes_per_s(cluster, profile)
    return AlgorithmCost(rate, start_s=profile.collective_latency_s + profile.nvls_latency_s)


def _has_nvls(cluster: Cluster, profile: Profile) -> bool:
    return cluster.nvlink_bytes_per_s > 0 and profile.nvls_efficiency > 0


def _nvls_bytes_per_s(cluster: Cluster, profile: Profile) -> float:
    """Return the bytes per second and member that NVSwitches all-reduce."""
    return cluster.nvlink_bytes_per_s * profile.nvlink_efficiency * profile.nvls_efficiency


def all_gather_s(group: Group, total_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """Return the seconds of an all-gather of a tensor of `total_bytes` when whole, or of its reduce-scatter.

    A reduce-scatter is an all-gather in reverse and takes as long.
    """
    if group.size == 1 or total_bytes == 0:
        return 0.0
    moved_bytes = (group.size - 1) / group.size * total_bytes
    if cluster.nvlink_bytes_per_s and not traffic(group, "ring", cluster).between:
        moved_bytes *= _few_members(group.size, profile)
    return ring_cost(group, cluster, profile).seconds(moved_bytes)


def _few_members(members: int, profile: Profile) -> float:
    """Return how much longer an all-gather's bytes take over NVLink than in a ring of eight members.

    Every member also copies its own part, which has more weight if there are few other parts.
    """
    return 1.0 + (1.0 / profile.nvlink_pair_share - 1.0) * (members / (members - 1) - 8 / 7) / (2 - 8 / 7)


def all_reduce_s(group: Group, total_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """Return the seconds of an all-reduce of `total_bytes`, by ring, trees or NVLS."""
    if group.size == 1 or total_bytes == 0:
        return 0.0
    ring = ring_cost(group, cluster, profile)
    moved_bytes = 2 * (group.size - 1) / group.size * total_bytes
    seconds = ring.seconds(moved_bytes, passes=2)
    if traffic(group, "ring", cluster).between:
        return min(seconds, tree_cost(group, cluster, profile).seconds(total_bytes, passes=2))
    if _has_nvls(cluster, profile):
        return min(seconds, nvls_cost(cluster, profile).seconds(total_bytes))
    return seconds


@lru_cache(maxsize=1 << 14)
def _all_to_all_rates(group: Group, cluster: Cluster, profile: Profile) -> tuple[float, float]:
    """Return (bytes per second and rank, latency in seconds) of an all-to-all."""
    flows = traffic(group, "all-to-all", cluster)
    spread = _spread(group, flows, cluster)
    rate = member_bytes_per_s(flows, spread.members, cluster, profile)
    # Messages to the domains are sent one domain after another, those to the same domain concurrently.
    return rate, profile.collective_latency_s + flows.latency_s * spread.domains


def all_to_all_s(group: Group, sent_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """Return the seconds of an all-to-all: every rank spreads `sent_bytes` evenly over all members and itself."""
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    rate, latency_s = _all_to_all_rates(group, cluster, profile)
    return latency_s + sent_bytes / rate


@lru_cache(maxsize=1 << 14)
def _neighbour_rates(group: Group, cluster: Cluster, profile: Profile) -> tuple[float, float]:
    """Return (bytes per second, latency in seconds) between the neighbors of a group that are farthest apart."""
    flows = traffic(group, "neighbour", cluster)
    return member_bytes_per_s(flows, 1, cluster, profile), profile.collective_latency_s + flows.latency_s


def point_to_point_s(group: Group, sent_bytes: float, cluster: Cluster, profile: Profile) -> float:
    """Return the seconds of the slowest message from a member of a group to the next, which may leave the node."""
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    rate, latency_s = _neighbour_rates(group, cluster, profile)
    return latency_s + sent_bytes / rate
