"""Device memory that NCCL takes for a communicator: for its channels, and for the operations it is used for.

Formulas and defaults are those of NCCL 2.27; 2.22 to 2.30 differ in details. A communicator takes some memory per
channel when it is created, and buffers for a connection when the first operation needs it (NCCL 2.22 and later with
cuMem, `group.cc::ncclCollPreconnectFunc`; `init.cc`, NCCL_RUNTIME_CONNECT). An algorithm connects all channels of the
communicator, however small its first message is. Values that NCCL chooses by architecture are in the profile.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from topoplan.network.placement import Group, Span, span
from topoplan.network.topology import local_ranks
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile

Use = Literal["small all-reduce", "large all-reduce", "gather", "all-to-all", "neighbours"]
"""gather: all-gather or reduce-scatter; neighbours: send and receive with the previous and the next rank."""

_MIB = 2**20
_GRANULARITY = 2 * _MIB
"""What every allocation is rounded up to: CUDA_IPC_MIN of `include/comm.h`, and cuMemGetAllocationGranularity."""
_HEADER_BYTES = 4096
"""ncclSendMem and ncclRecvMem before a buffer; `include/comm.h`, MEM_ALIGN."""
LL_BYTES = 8 * 512 * 8 * 16
"""Buffer of protocol LL; `init.cc`, DEFAULT_LL_BUFFSIZE."""
LL128_BYTES = 120 * 640 * 8 * 8
"""Buffer of protocol LL128; `init.cc`, DEFAULT_LL128_BUFFSIZE."""
SIMPLE_BYTES = 4 * _MIB
"""Buffer of protocol Simple; `init.cc`, DEFAULT_BUFFSIZE (NCCL_BUFFSIZE)."""


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _GRANULARITY) * _GRANULARITY


P2P_SEND_BYTES = _rounded(_HEADER_BYTES)
"""Sending end inside a domain: only flags (`transport/p2p.cc::p2pSendSetup`)."""
P2P_RECEIVE_BYTES = _rounded(_HEADER_BYTES + LL_BYTES + LL128_BYTES + SIMPLE_BYTES)
"""Receiving end inside a domain (`transport/p2p.cc::p2pRecvSetup`): 10,485,760 bytes. If the receiver reads (A100 over
NVLink), Simple's buffer is on the sending end and both ends have 6 MiB; the sum is the same."""
NET_SEND_BYTES = _rounded(LL128_BYTES + SIMPLE_BYTES)
"""Sending end between nodes with GPUDirect RDMA; LL's buffer is in host memory (`transport/net.cc`,
sendProxyConnect)."""
NET_RECEIVE_BYTES = _rounded(LL_BYTES + LL128_BYTES + SIMPLE_BYTES)
"""Receiving end between nodes with GPUDirect RDMA (`transport/net.cc::recvProxyConnect`)."""
CHANNEL_BYTES = 3 * _GRANULARITY
"""Tables of one channel, each of a few hundred bytes: devPeers twice and devRingUserRanks
(`channel.cc::initChannel`)."""
COMMUNICATOR_BYTES = 2 * _GRANULARITY
"""Tables of the communicator (`init.cc::devCommSetup`)."""
NET_SLOT_BYTES = 16 * 128 * 1024
"""One channel's part of the buffers shared by all send/receive operations between nodes; `transport/net.cc`,
NCCL_SHARED_STEPS, and `init.cc`, NCCL_P2P_NET_CHUNKSIZE."""
NVLS_SLOT_BYTES = 2 * 8 * 128 * 1024
"""NVLink SHARP's buffers per channel and head; `transport/nvls.cc::ncclNvlsBufferSetup`, NCCL_NVLS_CHUNKSIZE."""
MOST_NVLS_HEADS = 32
"""`include/device.h`, NCCL_MAX_NVLS_ARITY."""

MOST_CHANNELS = 64
"""`include/device.h`, MAXCHANNELS; the search for rings goes up to half of it."""
PCIE_CHANNELS = 2
"""Channels without NVLink: one ring, used twice."""
_SLOWEST = 0.49
"""The search stops at rates below this fraction of the best one so far; `graph/search.cc::ncclTopoCompute`."""


class Channels(NamedTuple):
    """Numbers of channels of a communicator."""

    collective: int
    """Channels of rings and trees."""
    nvls: int
    """Channels of NVLink SHARP; 0 without it."""
    p2p: int
    """Channels of send and receive."""
    per_peer: int
    """Channels of `p2p` that one pair of ranks uses."""


@lru_cache(maxsize=4096)
def channels_of(size: int, spread: Span, cluster: Cluster, profile: Profile) -> Channels:
    """Return how many channels NCCL opens for a communicator of `size` ranks.

    Source: `graph/search.cc::ncclTopoCompute` and `ncclTopoDupChannels`, `graph/connect.cc::ncclTopoPostset`,
    `transport/nvls.cc::ncclNvlsInit`, `graph/paths.cc::ncclTopoComputeP2pChannels`. The search itself is assumed to
    find the best rings that the rates of the links allow.
    """
    if size == 1:
        return Channels(MOST_CHANNELS, 0, MOST_CHANNELS, 0)
    collective = _ring_channels(spread, cluster, profile)
    nvls = _nvls_channels(spread, cluster, profile)
    collective = max(collective, nvls)
    nvlinks = int(cluster.nvlink_bytes_per_s / 1e9 / profile.nvlink_gb_per_s)
    per_peer = min(collective, 2 * max(1, nvlinks))
    if spread.domains > 1:
        # Two per NIC, fewer if there are many peers, but at least one for each NIC of a GPU.
        many = 2 if 2 * size <= 4 * collective else 1
        per_peer = min(per_peer if spread.largest > 1 else collective, max(many, _nics(1, cluster)))
    return Channels(collective, nvls, _power_of_two(collective), _power_of_two(per_peer))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _nics(members: int, cluster: Cluster) -> int:
    return max(1, members * cluster.nics_per_node // cluster.gpus_per_node)


def _ring_channels(spread: Span, cluster: Cluster, profile: Profile) -> int:
    """Return the number of rings that the links carry at the best rate, doubled once or twice."""
    has_nvlink = cluster.nvlink_bytes_per_s > 0
    if spread.largest > 1 and not has_nvlink:
        return PCIE_CHANNELS
    inside = cluster.nvlink_bytes_per_s / 1e9 * profile.nccl_nvlink_gb_per_s / profile.nvlink_gb_per_s
    nics, nic = _nics(spread.members, cluster), cluster.nic_bytes_per_s / 1e9

    def rings_at(speed: float) -> int:
        rings = most if spread.domains == 1 else nics * int(nic / speed)
        return min(most, rings if spread.largest == 1 else min(rings, int(inside / speed)))

    most = MOST_CHANNELS // 2
    rings, speed = 0, 0.0
    for slower in profile.nccl_inside_gb_per_s if spread.domains == 1 else profile.nccl_between_gb_per_s:
        # NCCL does not look for twice as many rings of half the rate.
        if rings and slower <= _SLOWEST * speed:
            break
        if (more := rings_at(slower)) * slower > rings * speed:
            rings, speed = more, slower
    rings = max(1, rings)
    is_narrow = speed < 50 and rings > 4
    if speed >= 25 and (not is_narrow or profile.nccl_doubles_narrow_rings):
        rings = min(most, 2 * rings)
    return 2 * rings


def _nvls_channels(spread: Span, cluster: Cluster, profile: Profile) -> int:
    """Return the channels of NVLink SHARP, which requires more than two ranks in a domain."""
    if not cluster.nvlink_bytes_per_s or spread.largest <= 2:
        return 0
    return profile.nvls_inside_channels if spread.domains == 1 else profile.nvls_between_channels


@lru_cache(maxsize=1 << 14)
def buffer_bytes(size: int, spread: Span, uses: frozenset[Use], cluster: Cluster, profile: Profile) -> int:
    """Return the device memory of a communicator of `size` ranks, on the rank that needs the most.

    `uses` are the operations that it is used for. Between nodes without RDMA (plain TCP) the buffers are in host
    memory.
    """
    channels = channels_of(size, spread, cluster, profile)
    total = COMMUNICATOR_BYTES + CHANNEL_BYTES * max(channels.collective, channels.p2p)
    if channels.nvls:
        # nvlsDevPeers of each channel, and the credits (`channel.cc::initNvlsChannel`, `transport/nvls.cc`).
        total += _GRANULARITY * (channels.collective + 1)
    if size == 1:
        return total
    is_one_domain = spread.domains == 1
    # By the tuner's latencies NCCL chooses trees for small messages between domains, and rings inside one
    # (`graph/tuning.cc`).
    ring = "gather" in uses or (is_one_domain and "small all-reduce" in uses)
    tree = not is_one_domain and "small all-reduce" in uses
    if "large all-reduce" in uses:
        if is_one_domain and channels.nvls:
            total += NVLS_SLOT_BYTES * channels.nvls * min(spread.largest, MOST_NVLS_HEADS)
        else:
            ring = True
    total += _collective_bytes(channels.collective, spread, cluster, ring=ring, tree=tree)
    if "all-to-all" in uses:
        total += _send_receive_bytes(channels, spread.largest - 1, spread.domains > 1, spread.largest, cluster)
    if "neighbours" in uses:
        near = min(2, spread.largest - 1)
        total += _send_receive_bytes(channels, near, spread.domains > 1, 1, cluster)
    return total


def _net(cluster: Cluster, size_bytes: int) -> int:
    """Return the bytes of buffers that RDMA needs on the GPU; 0 over plain TCP."""
    return 0 if cluster.fabric.kind == "ethernet" else size_bytes


def _collective_bytes(channels: int, spread: Span, cluster: Cluster, *, ring: bool, tree: bool) -> int:
    """Return the bytes of the connections of rings and trees.

    A ring enters a member and leaves it. Inside a domain a tree is a chain: its members are connected both ways with
    the previous and the next one, and half of these connections are also the ring's. Between domains there are two
    binary trees, and a domain is a leaf in one of them, so it has two neighbors per tree on average.
    """
    pair = P2P_SEND_BYTES + P2P_RECEIVE_BYTES
    chain = min(2, spread.largest - 1)
    inside = max(ring * min(1, chain), tree * chain)
    total = channels * inside * pair
    if spread.domains > 1:
        # The members take turns as the place where a channel enters and leaves the domain.
        gates = -(-channels // spread.members)
        outside = ring + tree * min(2, spread.domains - 1)
        total += gates * outside * _net(cluster, NET_SEND_BYTES + NET_RECEIVE_BYTES)
        if ring and inside and not tree:
            total -= gates * pair
    return total


def _send_receive_bytes(channels: Channels, near: int, has_far: bool, proxied: int, cluster: Cluster) -> int:
    """Return the bytes of connections with peers inside the domain, and of the buffers shared by all outside it.

    `near`: peers inside the domain. `proxied`: ranks of the domain that send through this rank's NIC (PXN), each with a
    buffer of its own (`transport/net.cc::sharedNetBuffersInit`).
    """
    total = near * channels.per_peer * (P2P_SEND_BYTES + P2P_RECEIVE_BYTES)
    if has_far:
        senders = proxied if cluster.nvlink_bytes_per_s else 1
        total += _net(cluster, (1 + senders) * channels.p2p * NET_SLOT_BYTES)
    return total


ALONE = Group(1, 1)
"""One rank."""


class UsedGroup(NamedTuple):
    """A group in which a rank communicates, and what is sent in it."""

    name: str
    group: Group
    uses: frozenset[Use]
    across: Group = ALONE
    """Groups of this shape are one group together: with the ranks of a pipeline, `group` is repeated on each stage."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size * self.across.size

    def span(self, domain_size: int) -> Span:
        """Return the spread over domains of `domain_size` consecutive ranks."""
        one, other = span(self.group, domain_size), span(self.across, domain_size)
        return Span(one.domains * other.domains, one.members * other.members, one.largest * other.largest)


class Communicator(NamedTuple):
    """A communicator of a rank with its memory."""

    name: str
    size: int
    """Number of ranks."""
    device_bytes: int
    """Bytes of buffers and tables, on the rank that needs the most."""


def communicators_of(groups: Iterable[UsedGroup], cluster: Cluster, profile: Profile) -> tuple[Communicator, ...]:
    """Return the communicators with their memory."""
    domain = local_ranks(cluster)
    return tuple(
        Communicator(one.name, one.size, buffer_bytes(one.size, one.span(domain), one.uses, cluster, profile))
        for one in groups
    )
