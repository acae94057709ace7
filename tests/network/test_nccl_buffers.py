"""NCCL's buffers: published sizes of single communicators, and what each operation adds."""

from dataclasses import replace

import pytest

from tests.network.clusters import cluster_of
from topoplan.network.nccl_buffers import (
    CHANNEL_BYTES,
    NET_RECEIVE_BYTES,
    NET_SEND_BYTES,
    P2P_RECEIVE_BYTES,
    P2P_SEND_BYTES,
    Channels,
    Use,
    UsedGroup,
    buffer_bytes,
    channels_of,
    communicators_of,
)
from topoplan.network.placement import Group, Span
from topoplan.specs.cluster import Cluster, Fabric
from topoplan.specs.gpu_profile import profile_of

MIB = 2**20
PAIR = P2P_SEND_BYTES + P2P_RECEIVE_BYTES
SHARED_SLOT = 16 * 512 * 1024
"""One channel of the send/receive buffer that NCCL before 2.22 set up with every single-machine communicator."""


def bytes_of(cluster: Cluster, size: int, spread: Span, *uses: Use) -> int:
    return buffer_bytes(size, spread, frozenset(uses), cluster, profile_of(cluster.gpu))


def channels(cluster: Cluster, size: int, spread: Span) -> Channels:
    return channels_of(size, spread, cluster, profile_of(cluster.gpu))


A100, H100, B200 = (cluster_of(name, nodes=1) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb"))
TWO, FOUR, EIGHT = (Span(1, size, size) for size in (2, 4, 8))


def test_ends_of_a_connection_have_the_sizes_that_nccl_logs() -> None:
    # NCCL issue 1685, NCCL_DEBUG_SUBSYS=ALLOC on 8 H100: allocations of two sizes.
    assert (P2P_RECEIVE_BYTES, P2P_SEND_BYTES) == (10485760, 2097152)
    assert (NET_SEND_BYTES, NET_RECEIVE_BYTES) == (10 * MIB, 10 * MIB)


@pytest.mark.parametrize(
    ("cluster", "size", "spread", "collective", "source"),
    [
        (A100, 4, FOUR, 24, "NCCL issue 964: 12 MiB x 24 of its 544 MiB"),
        (H100, 8, EIGHT, 24, "NCCL issue 1259, H100 with NVSwitch: channels 00 to 23"),
        (B200, 8, EIGHT, 32, "NCCL issue 1646, DGX B200: Channel 04/32"),
        (cluster_of(nodes=1, nvlink_bytes_per_s=200e9), 2, TWO, 16, "NCCL issue 892, H800: 16 coll channels"),
        (cluster_of(nodes=3), 24, Span(3, 8, 8), 16, "NCCL issue 1453, 3 x 8 H100: Channel 00/16"),
        (cluster_of(nodes=2), 4, Span(2, 2, 2), 8, "NCCL issue 1189, 2 x 2 H20: 8 coll channels"),
        (cluster_of(nodes=2), 2, Span(2, 1, 1), 4, "NCCL issue 1291, 2 x 1 GH200: Channel 00/04"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_channels_are_those_of_published_logs(
    cluster: Cluster, size: int, spread: Span, collective: int, source: str
) -> None:
    assert channels(cluster, size, spread).collective == collective, source


def test_channels_of_send_and_receive_are_those_of_published_logs() -> None:
    h800 = channels(cluster_of(nodes=1, nvlink_bytes_per_s=200e9), 8, EIGHT)
    assert (h800.p2p, h800.per_peer) == (16, 16)  # NCCL issue 892
    h100 = channels(H100, 8, EIGHT)
    assert (h100.p2p, h100.per_peer) == (32, 32)  # NCCL issue 1685
    h20 = channels(cluster_of(nodes=2), 4, Span(2, 2, 2))
    assert (h20.p2p, h20.per_peer) == (8, 2)  # NCCL issue 1189


def test_four_a100_take_what_was_measured_before_connections_were_made_on_demand() -> None:
    # NCCL issue 964: 544 MiB in a group of two, 688 MiB in one of three or four (rank 0, an end of the tree's chain).
    pair, four = channels(A100, 2, TWO), channels(A100, 4, FOUR)
    ring = pair.collective * PAIR
    assert ring + pair.p2p * SHARED_SLOT == 544 * MIB
    one_end_more = four.collective * PAIR // 2  # 6 MiB each way, since an A100 reads
    assert ring + four.p2p * SHARED_SLOT + one_end_more == 688 * MIB


def test_the_first_all_to_all_of_eight_h100_takes_about_what_was_measured() -> None:
    # NCCL issue 1685: from 1.06 to 4.34 GB outside PyTorch. The rest is kernels, and earlier operations.
    predicted = bytes_of(H100, 8, EIGHT, "all-to-all")
    assert predicted == pytest.approx(3.28e9, rel=0.1)
    assert predicted - bytes_of(H100, 8, EIGHT) == 7 * 32 * PAIR


def test_a_communicator_of_one_rank_has_the_tables_of_all_channels() -> None:
    # NCCL pull request 2366: 484 MiB on an RTX 3090, with NCCL's kernels; issue 2363: 512 MiB more without lazy setup.
    one = cluster_of("rtx4090-24gb", nodes=1)
    alone = bytes_of(one, 1, Span(1, 1, 1), "small all-reduce")
    assert 0.75 * 484 * MIB < alone < 484 * MIB
    assert channels(one, 1, Span(1, 1, 1)).p2p * SHARED_SLOT == 512 * MIB


def test_a_ring_of_eight_gb200_takes_what_suspending_it_gives_back() -> None:
    # SGLang pull request 30908: 576 MiB per GPU, a communicator of 8 GB200; NVLink SHARP's tables are not suspended.
    assert channels(B200, 8, EIGHT).collective * (PAIR + CHANNEL_BYTES) == 576 * MIB


def test_more_uses_take_more() -> None:
    both = cluster_of(nodes=2)
    spread = Span(2, 8, 8)
    idle = bytes_of(both, 16, spread)
    ring = bytes_of(both, 16, spread, "gather")
    assert idle < ring < bytes_of(both, 16, spread, "gather", "small all-reduce")
    assert idle < bytes_of(both, 16, spread, "neighbours") < bytes_of(both, 16, spread, "all-to-all")
    # 14 connections inside the domain and 2 to the other domain.
    assert ring - idle == 14 * PAIR + 2 * (NET_SEND_BYTES + NET_RECEIVE_BYTES)


def test_large_sums_go_through_the_switch_from_hopper_on() -> None:
    assert bytes_of(H100, 8, EIGHT, "large all-reduce") - bytes_of(H100, 8, EIGHT) == 16 * 8 * 2 * MIB
    assert bytes_of(A100, 8, EIGHT, "large all-reduce") == bytes_of(A100, 8, EIGHT, "gather")
    assert bytes_of(H100, 2, TWO, "large all-reduce") == bytes_of(H100, 2, TWO, "gather")


def test_without_rdma_no_buffer_between_nodes_is_on_the_gpu() -> None:
    tcp = cluster_of(nodes=2, nic_bytes_per_s=12.5e9, kind="ethernet")
    apart = Span(2, 1, 1)
    assert bytes_of(tcp, 2, apart, "gather", "all-to-all") == bytes_of(tcp, 2, apart)
    rdma = replace(tcp, fabric=Fabric(kind="roce"))
    assert bytes_of(rdma, 2, apart, "gather") > bytes_of(rdma, 2, apart)


def test_cards_without_nvlink_open_few_channels() -> None:
    cards = cluster_of("a100-pcie-80gb", nodes=1, nvlink_bytes_per_s=0)
    assert bytes_of(cards, 8, EIGHT, "gather") < 64 * MIB


TWO_NODES = cluster_of(nodes=2)


def device_bytes(size: int, stride: int, *uses: Use) -> int:
    groups = [UsedGroup("a group", Group(size, stride), frozenset(uses))]
    (one,) = communicators_of(groups, TWO_NODES, profile_of(TWO_NODES.gpu))
    assert (one.name, one.size) == ("a group", size)
    return one.device_bytes


def test_one_communicator_costs_what_is_sent_in_it() -> None:
    gathers, trades = device_bytes(8, 1, "gather"), device_bytes(8, 1, "gather", "all-to-all")
    assert 0 < device_bytes(8, 1) < gathers < trades


def test_the_same_ranks_in_two_groups_cost_twice() -> None:
    groups = [UsedGroup(name, Group(16, 1), frozenset({"gather"})) for name in ("one", "another")]
    one, another = communicators_of(groups, TWO_NODES, profile_of(TWO_NODES.gpu))
    assert one.device_bytes == another.device_bytes > 0


def test_it_counts_where_the_ranks_are() -> None:
    assert device_bytes(2, 8, "large all-reduce") != device_bytes(2, 1, "large all-reduce")
