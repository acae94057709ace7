"""The memory of communicators that an engine lists."""

from tests.network.clusters import cluster_of
from topoplan.network.communicators import UsedGroup, communicators_of
from topoplan.network.placement import Group
from topoplan.specs.gpu_profile import profile_of

H100 = cluster_of("h100-sxm-80gb", nodes=2)
PROFILE = profile_of(H100.gpu)


def device_bytes(size: int, stride: int, *uses: str) -> int:
    (one,) = communicators_of([UsedGroup("a group", Group(size, stride), frozenset(uses))], H100, PROFILE)  # type: ignore[arg-type]
    assert (one.name, one.size) == ("a group", size)
    return one.device_bytes


def test_one_communicator_costs_what_is_sent_in_it() -> None:
    gathers, trades = device_bytes(8, 1, "gather"), device_bytes(8, 1, "gather", "all-to-all")
    assert 0 < device_bytes(8, 1) < gathers < trades


def test_the_same_ranks_in_two_groups_cost_twice() -> None:
    groups = [UsedGroup(name, Group(16, 1), frozenset({"gather"})) for name in ("one", "another")]
    one, another = communicators_of(groups, H100, PROFILE)
    assert one.device_bytes == another.device_bytes > 0


def test_it_counts_where_the_ranks_are() -> None:
    assert device_bytes(2, 8, "large all-reduce") != device_bytes(2, 1, "large all-reduce")
