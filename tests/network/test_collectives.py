"""Collectives worked out by hand on small groups, and which links they cross."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engines.samples import DENSE, spec_of
from topoplan.network.collectives import (
    TCP_SOCKETS,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    nvls_cost,
    point_to_point_s,
    ring_cost,
    tree_cost,
)
from topoplan.network.placement import Group
from topoplan.network.topology import SOCKET_BYTES_PER_S
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile, profile_of

SIZE = 256e6
Collective = Callable[[Group, float, Cluster, Profile], float]


def cluster_of(gpu: str = "h100-sxm-80gb", nodes: int = 4, gpus_per_node: int = 8) -> tuple[Cluster, Profile]:
    cluster = spec_of(DENSE, gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node).cluster
    return cluster, profile_of(cluster.gpu)


H100, HOPPER = cluster_of()
A100, AMPERE = cluster_of("a100-sxm-80gb")
NVLINK = 450e9 * HOPPER.nvlink_efficiency
NIC = 50e9 * HOPPER.network_efficiency


def rate(group: Group, cluster: Cluster = H100, profile: Profile = HOPPER) -> float:
    """Return the bus bandwidth of a ring."""
    return ring_cost(group, cluster, profile).rate_bytes_per_s


def bandwidth_term(group: Group, seconds: float, passes: int = 1) -> float:
    """Return the seconds of a ring collective without its latency."""
    return seconds - ring_cost(group, H100, HOPPER).latency_s(passes)


def test_a_ring_all_gather_sends_all_but_ones_own_share() -> None:
    for n in (2, 4, 8):
        seconds = bandwidth_term(Group(n, 1), all_gather_s(Group(n, 1), SIZE, H100, HOPPER))
        few = 1.0 if n == 8 else 309 / 332 if n == 4 else HOPPER.nvlink_pair_share
        assert seconds == pytest.approx((n - 1) / n * SIZE / NVLINK / few, rel=0.01)


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    group = Group(2, 1)  # two GPUs gain nothing from NVLS
    gather = bandwidth_term(group, all_gather_s(group, SIZE, H100, HOPPER)) * HOPPER.nvlink_pair_share
    reduce = bandwidth_term(group, all_reduce_s(group, SIZE, H100, HOPPER), passes=2)
    assert reduce == pytest.approx(2 * gather)


def test_nvswitches_add_up_from_hopper_on() -> None:
    group = Group(8, 1)
    nvls = nvls_cost(H100, HOPPER)
    assert all_reduce_s(group, SIZE, H100, HOPPER) == pytest.approx(
        nvls.start_s + SIZE / (NVLINK * HOPPER.nvls_efficiency)
    )
    ring = ring_cost(group, A100, AMPERE)
    assert all_reduce_s(group, SIZE, A100, AMPERE) == pytest.approx(ring.seconds(2 * 7 / 8 * SIZE, passes=2))
    # nccl-tests show 274 GB/s of algorithm bandwidth on eight H100s.
    assert SIZE * 100 / all_reduce_s(group, SIZE * 100, H100, HOPPER) == pytest.approx(274e9, rel=0.12)


def test_nvls_is_not_taken_for_a_gather() -> None:
    group = Group(8, 1)
    assert bandwidth_term(group, all_gather_s(group, SIZE, H100, HOPPER)) == pytest.approx(7 / 8 * SIZE / NVLINK)


def test_small_messages_over_many_nodes_take_trees_and_large_ones_rings() -> None:
    cluster, profile = cluster_of("a100-sxm-80gb", nodes=64)
    group = Group(64, 8)
    ring, tree = ring_cost(group, cluster, profile), tree_cost(group, cluster, profile)
    small, large = 1e6, 1e10
    assert all_reduce_s(group, small, cluster, profile) == tree.seconds(small, passes=2)
    assert all_reduce_s(group, large, cluster, profile) == ring.seconds(2 * 63 / 64 * large, passes=2)
    assert tree.network_hops_s == pytest.approx(6 * profile.network_hop_latency_s)
    assert ring.network_hops_s == pytest.approx(63 * profile.network_hop_latency_s)
    # Every node sends the tensor up and down, as in a ring.
    assert tree.rate_bytes_per_s == pytest.approx(ring.rate_bytes_per_s / 2 * profile.tree_efficiency)


def test_tiny_messages_take_the_low_latency_protocol() -> None:
    ring = ring_cost(Group(8, 1), H100, HOPPER)
    low = HOPPER.collective_latency_s + 7 * HOPPER.hop_latency_s * HOPPER.ll_hop_share
    assert ring.seconds(1e3) == pytest.approx(low + 1e3 / (NVLINK * HOPPER.ll_efficiency))
    assert ring.seconds(1e9) == pytest.approx(ring.latency_s(1) + 1e9 / NVLINK)


def test_a_ring_over_nodes_pays_for_every_one_of_them() -> None:
    near, far = (ring_cost(Group(n, 8), cluster_of(nodes=64)[0], HOPPER) for n in (2, 64))
    assert far.network_s == pytest.approx(63 * near.network_s)
    assert near.network_s == pytest.approx(H100.fabric.latency_s)


def test_tcp_is_slower_than_rdma() -> None:
    ethernet = replace(H100, fabric=replace(H100.fabric, kind="ethernet"))
    tcp = TCP_SOCKETS * HOPPER.tcp_socket_bytes_per_s
    assert rate(Group(4, 8), ethernet) == tcp
    assert rate(Group(32, 1), ethernet) == 8 * tcp
    slow = replace(ethernet, nic_bytes_per_s=1.25e9)
    assert rate(Group(4, 8), slow) == pytest.approx(1.25e9 * HOPPER.network_efficiency)
    assert rate(Group(8, 1), ethernet) == rate(Group(8, 1))


@pytest.mark.parametrize("collective", [all_gather_s, all_reduce_s, all_to_all_s])
def test_a_group_of_one_and_no_bytes_cost_nothing(collective: Collective) -> None:
    assert collective(Group(1, 1), SIZE, H100, HOPPER) == 0
    assert collective(Group(8, 1), 0, H100, HOPPER) == 0
    assert point_to_point_s(Group(1, 8), SIZE, H100, HOPPER) == 0


@pytest.mark.parametrize(
    "group", [Group(8, 1), Group(4, 1), Group(2, 4), Group(4, 2), Group(2, 1)], ids=lambda g: f"{g.size}x{g.stride}"
)
def test_groups_inside_a_node_never_cost_network_time(group: Group) -> None:
    slow = replace(H100, nic_bytes_per_s=1.0, fabric=replace(H100.fabric, latency_s=10.0))
    for collective in (all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s):
        assert collective(group, SIZE, slow, HOPPER) == collective(group, SIZE, H100, HOPPER)


def test_one_rank_a_node_rings_at_the_rate_of_its_share_of_the_nics() -> None:
    group = Group(4, 8)
    seconds = bandwidth_term(group, all_gather_s(group, SIZE, H100, HOPPER))
    assert seconds == pytest.approx(3 / 4 * SIZE / NIC)
    few = replace(H100, nics_per_node=2)
    assert rate(group, few) == pytest.approx(NIC / 4)


def test_members_of_a_node_bring_their_nics_along_up_to_nvlinks_rate() -> None:
    rates = [rate(Group(4 * members, 8 // members)) for members in (1, 2, 4, 8)]
    assert rates == pytest.approx([NIC, 2 * NIC, 4 * NIC, 8 * NIC])
    fast = replace(H100, nic_bytes_per_s=400e9)
    # Each of the eight rings starts at a different GPU, which does not receive that ring over NVLink.
    assert rate(Group(32, 1), fast) == pytest.approx(NVLINK * 8 / 7)


def test_oversubscription_slows_only_what_leaves_the_node() -> None:
    taxed = replace(H100, fabric=replace(H100.fabric, oversubscription=2.0))
    assert rate(Group(4, 8), taxed) == pytest.approx(NIC / 2)
    assert rate(Group(8, 1), taxed) == rate(Group(8, 1))


def test_oversubscription_slows_nothing_that_stays_on_its_leaf() -> None:
    taxed = replace(H100, fabric=replace(H100.fabric, oversubscription=4.0, nodes_per_leaf=2))
    assert rate(Group(2, 8), taxed) == pytest.approx(NIC)
    # Rings of four nodes cross from leaf to leaf once each way: eight rings share the uplinks of sixteen NICs.
    assert rate(Group(4, 8), taxed) == pytest.approx(NIC / 2)
    assert rate(Group(2, 16), taxed) == pytest.approx(NIC / 4)


def test_an_all_to_all_keeps_a_share_at_home() -> None:
    inside = all_to_all_s(Group(8, 1), SIZE, H100, HOPPER) - HOPPER.collective_latency_s
    assert inside == pytest.approx(7 / 8 * SIZE / NVLINK)
    # Sixteen ranks over two nodes: half of the bytes leave the node, over each rank's own NIC.
    latency = HOPPER.collective_latency_s + 2 * H100.fabric.latency_s
    outside = all_to_all_s(Group(16, 1), SIZE, H100, HOPPER) - latency
    assert outside == pytest.approx(max(8 / 16 * SIZE / NIC, 7 / 16 * SIZE / NVLINK))


def test_a_message_to_the_next_member_is_as_slow_as_the_farthest_one() -> None:
    near = point_to_point_s(Group(2, 1), SIZE, H100, HOPPER)
    assert near == pytest.approx(HOPPER.collective_latency_s + SIZE / NVLINK)
    # tp 4, cp 4: the ring's ranks 0, 4, 8, 12 cross from one node to the next, although they are four apart.
    crossing = point_to_point_s(Group(4, 4), SIZE, H100, HOPPER)
    latency = HOPPER.collective_latency_s + H100.fabric.latency_s
    assert crossing == pytest.approx(latency + SIZE / NIC)
    assert point_to_point_s(Group(4, 8), SIZE, H100, HOPPER) == pytest.approx(crossing)


def test_a_lone_sender_uses_the_nic_that_its_neighbours_leave_idle() -> None:
    shared = replace(H100, nics_per_node=1)
    latency = HOPPER.collective_latency_s + H100.fabric.latency_s
    # If all eight ranks send at once, each gets an eighth of the NIC. A single ring of all ranks has one crossing,
    # which gets all of it.
    assert point_to_point_s(Group(4, 8), SIZE, shared, HOPPER) == pytest.approx(latency + 8 * SIZE / NIC)
    assert point_to_point_s(Group(32, 1), SIZE, shared, HOPPER) == pytest.approx(latency + SIZE / NIC)
    assert point_to_point_s(Group(16, 2), SIZE, shared, HOPPER) == pytest.approx(latency + 2 * SIZE / NIC)


def test_a_rack_of_72_is_one_nvlink_domain() -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=18, gpus_per_node=4)
    slow = replace(cluster, nic_bytes_per_s=1.0)
    for group in (Group(72, 1), Group(8, 1), Group(9, 8), Group(36, 2)):
        assert all_gather_s(group, SIZE, slow, profile) == all_gather_s(group, SIZE, cluster, profile)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_a_job_inside_a_rack_of_72_never_leaves_nvlink(nodes: int) -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=nodes, gpus_per_node=4)
    world = cluster.world_size
    slow = replace(cluster, nic_bytes_per_s=1.0)
    for group in (Group(world, 1), Group(world // 2, 2), Group(2, world // 2)):
        for collective in (all_gather_s, all_to_all_s, point_to_point_s):
            assert collective(group, SIZE, slow, profile) == collective(group, SIZE, cluster, profile)


def test_a_job_of_several_racks_is_placed_in_blocks_of_64() -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=64, gpus_per_node=4)
    share = cluster.nic_bytes_per_s * cluster.nics_per_node / 4 * profile.network_efficiency
    assert rate(Group(4, 64), cluster, profile) == pytest.approx(share)
    local = cluster.nvlink_bytes_per_s * profile.nvlink_efficiency
    assert rate(Group(64, 1), cluster, profile) == pytest.approx(local)


def test_without_nvlink_ranks_talk_over_pcie_and_share_what_is_between_sockets() -> None:
    cluster, profile = cluster_of("a100-pcie-80gb", nodes=1)
    assert cluster.nvlink_bytes_per_s == 0
    pcie, sockets = cluster.pcie_bytes_per_s * profile.pcie_efficiency, SOCKET_BYTES_PER_S[1][1]
    assert rate(Group(4, 1), cluster, profile) == pytest.approx(pcie)
    # One, two and four flows each way: SimuMax's measurements of all-gathers and reduce-scatters, on average.
    for group, in_all in ((Group(8, 1), 12.3e9), (Group(4, 2), 14.7e9), (Group(2, 4), 15.8e9)):
        assert rate(group, cluster, profile) == pytest.approx(in_all / group.stride, rel=0.03)
        assert rate(group, cluster, profile) < min(pcie, sockets)
    assert all_gather_s(Group(2, 1), SIZE, cluster, profile) > all_gather_s(Group(2, 1), SIZE, H100, HOPPER)


def test_the_ends_of_a_pipeline_in_one_box_reduce_without_a_network() -> None:
    cluster, profile = cluster_of("a100-pcie-80gb", nodes=1)
    slow = replace(cluster, nic_bytes_per_s=1.0)
    assert all_reduce_s(Group(2, 6), SIZE, cluster, profile) == all_reduce_s(Group(2, 6), SIZE, slow, profile)


@pytest.mark.parametrize("collective", [all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s])
@pytest.mark.parametrize("group", [Group(8, 1), Group(4, 8), Group(16, 2), Group(32, 1)])
def test_more_bytes_take_longer(collective: Collective, group: Group) -> None:
    times = [collective(group, size, H100, HOPPER) for size in (1, 1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
