"""Collectives by hand on small groups, and which links they cross."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.cost.samples import DENSE, spec_of
from topoplan.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    nvlink_domain_size,
    point_to_point_s,
    ring,
)
from topoplan.cost.profile import Profile, profile_of
from topoplan.layout.placement import Group
from topoplan.specs.cluster import Cluster

SIZE = 256e6
Collective = Callable[[Group, float, Cluster, Profile], float]


def cluster_of(gpu: str = "h100-sxm-80gb", nodes: int = 4, gpus_per_node: int = 8) -> tuple[Cluster, Profile]:
    cluster = spec_of(DENSE, gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node).cluster
    return cluster, profile_of(cluster.gpu)


H100, HOPPER = cluster_of()
NVLINK = 450e9 * HOPPER.nvlink_efficiency
NIC = 50e9 * HOPPER.network_efficiency


def bandwidth_term(group: Group, seconds: float, cluster: Cluster = H100, profile: Profile = HOPPER) -> float:
    """Seconds of a collective without its latency."""
    return seconds - ring(group, cluster, profile)[1]


def test_a_ring_all_gather_sends_all_but_ones_own_share() -> None:
    for n in (2, 4, 8):
        seconds = bandwidth_term(Group(n, 1), all_gather_s(Group(n, 1), SIZE, H100, HOPPER))
        assert seconds == pytest.approx((n - 1) / n * SIZE / NVLINK)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    group = Group(8, 1)
    gather = bandwidth_term(group, all_gather_s(group, SIZE, H100, HOPPER))
    reduce = bandwidth_term(group, all_reduce_s(group, SIZE, H100, HOPPER))
    assert reduce == pytest.approx(2 * gather)


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
    assert ring(group, few, HOPPER)[0] == pytest.approx(NIC / 4)


def test_members_of_a_node_bring_their_nics_along_up_to_nvlinks_rate() -> None:
    rates = [ring(Group(4 * members, 8 // members), H100, HOPPER)[0] for members in (1, 2, 4, 8)]
    assert rates == pytest.approx([NIC, 2 * NIC, 4 * NIC, 8 * NIC])
    fast = replace(H100, nic_bytes_per_s=400e9)
    assert ring(Group(32, 1), fast, HOPPER)[0] == pytest.approx(NVLINK)


def test_oversubscription_slows_only_what_leaves_the_node() -> None:
    taxed = replace(H100, fabric=replace(H100.fabric, oversubscription=2.0))
    assert ring(Group(4, 8), taxed, HOPPER)[0] == pytest.approx(NIC / 2)
    assert ring(Group(8, 1), taxed, HOPPER) == ring(Group(8, 1), H100, HOPPER)


def test_an_all_to_all_keeps_a_share_at_home() -> None:
    inside = all_to_all_s(Group(8, 1), SIZE, H100, HOPPER) - HOPPER.collective_latency_s
    assert inside == pytest.approx(7 / 8 * SIZE / NVLINK)
    # Sixteen ranks over two nodes: half of the bytes leave, over each rank's own NIC.
    latency = HOPPER.collective_latency_s + 2 * H100.fabric.latency_s
    outside = all_to_all_s(Group(16, 1), SIZE, H100, HOPPER) - latency
    assert outside == pytest.approx(max(8 / 16 * SIZE / NIC, 7 / 16 * SIZE / NVLINK))


def test_a_message_to_the_next_member_is_as_slow_as_the_farthest_one() -> None:
    near = point_to_point_s(Group(2, 1), SIZE, H100, HOPPER)
    assert near == pytest.approx(HOPPER.collective_latency_s + SIZE / NVLINK)
    # tp 4, cp 4: the ring's ranks 0, 4, 8, 12 cross from one node to the next, though they are four apart.
    crossing = point_to_point_s(Group(4, 4), SIZE, H100, HOPPER)
    latency = HOPPER.collective_latency_s + H100.fabric.latency_s
    assert crossing == pytest.approx(latency + SIZE / NIC)
    assert point_to_point_s(Group(4, 8), SIZE, H100, HOPPER) == pytest.approx(crossing)


def test_a_lone_sender_uses_the_nic_that_its_neighbours_leave_idle() -> None:
    shared = replace(H100, nics_per_node=1)
    latency = HOPPER.collective_latency_s + H100.fabric.latency_s
    # All eight ranks send at once: an eighth of the NIC each. One ring of all ranks: all of it for its one crossing.
    assert point_to_point_s(Group(4, 8), SIZE, shared, HOPPER) == pytest.approx(latency + 8 * SIZE / NIC)
    assert point_to_point_s(Group(32, 1), SIZE, shared, HOPPER) == pytest.approx(latency + SIZE / NIC)
    assert point_to_point_s(Group(16, 2), SIZE, shared, HOPPER) == pytest.approx(latency + 2 * SIZE / NIC)


def test_a_rack_of_72_is_one_nvlink_domain() -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=18, gpus_per_node=4)
    assert nvlink_domain_size(cluster) == 72
    slow = replace(cluster, nic_bytes_per_s=1.0)
    for group in (Group(72, 1), Group(8, 1), Group(9, 8), Group(36, 2)):
        assert all_gather_s(group, SIZE, slow, profile) == all_gather_s(group, SIZE, cluster, profile)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_a_job_inside_a_rack_of_72_never_leaves_nvlink(nodes: int) -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=nodes, gpus_per_node=4)
    world = cluster.world_size
    assert nvlink_domain_size(cluster) == world
    slow = replace(cluster, nic_bytes_per_s=1.0)
    for group in (Group(world, 1), Group(world // 2, 2), Group(2, world // 2)):
        for collective in (all_gather_s, all_to_all_s, point_to_point_s):
            assert collective(group, SIZE, slow, profile) == collective(group, SIZE, cluster, profile)


def test_a_job_of_several_racks_is_placed_in_blocks_of_64() -> None:
    cluster, profile = cluster_of("gb200-nvl72-186gb", nodes=64, gpus_per_node=4)
    assert nvlink_domain_size(cluster) == 64
    share = cluster.nic_bytes_per_s * cluster.nics_per_node / 4 * profile.network_efficiency
    assert ring(Group(4, 64), cluster, profile)[0] == pytest.approx(share)
    local = cluster.nvlink_bytes_per_s * profile.nvlink_efficiency
    assert ring(Group(64, 1), cluster, profile)[0] == pytest.approx(local)


def test_without_nvlink_ranks_talk_over_pcie_and_distant_ones_share_it() -> None:
    cluster, profile = cluster_of("rtx4090-24gb", nodes=2)
    assert cluster.nvlink_bytes_per_s == 0
    rate = cluster.pcie_bytes_per_s * profile.pcie_efficiency
    assert ring(Group(8, 1), cluster, profile)[0] == pytest.approx(rate)
    assert ring(Group(4, 2), cluster, profile)[0] == pytest.approx(rate / 2)
    assert all_gather_s(Group(2, 1), SIZE, cluster, profile) > all_gather_s(Group(2, 1), SIZE, H100, HOPPER)


@pytest.mark.parametrize("collective", [all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s])
@pytest.mark.parametrize("group", [Group(8, 1), Group(4, 8), Group(16, 2), Group(32, 1)])
def test_more_bytes_take_longer(collective: Collective, group: Group) -> None:
    times = [collective(group, size, H100, HOPPER) for size in (1, 1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
