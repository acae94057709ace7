import pytest

from tests.network.clusters import cluster_of
from tests.planner.sharded_cases import DENSE, plan_of
from tests.planner.test_communication import layout_of
from tests.report.printed import printed
from topoplan.planner.communication import group_links, step_flows
from topoplan.report.topology_groups import members, print_groups, print_step_flows


def test_a_row_a_kind_with_its_tightest_link() -> None:
    cluster, layout = cluster_of(nodes=4), layout_of(tp=8, dp=4)
    lines = printed(print_groups, layout, group_links(cluster, layout)).splitlines()
    (dp,) = [line for line in lines if line.startswith("dp ")]
    assert dp.split()[1:3] == ["4", "8"]
    assert "NIC 400Gb/s" in dp
    assert dp.split()[-1] == "42.5"
    assert max(map(len, lines)) <= 100


def test_a_layout_without_groups_says_so_and_plans_without_flows_have_no_bytes() -> None:
    assert "none has more than one member" in printed(print_groups, layout_of(dp=1), ())
    assert not printed(print_step_flows, ())


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0, 1), "0, 1"), (range(8), "0-7"), ((0, 8, 16), "0, 8, 16"), (range(0, 64, 8), "0, 8, .. 56")],
)
def test_members_in_short(ranks: tuple[int, ...], words: str) -> None:
    assert members(ranks) == words


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_plan_that_splits_data_alone_has_its_own_words(width: int) -> None:
    spec, plan = plan_of(DENSE, {"backend": "fsdp2", "ulysses": 4, "sharding": "hybrid"}, {})
    rows = group_links(spec.cluster, plan.layout)
    text = printed(print_groups, plan.layout, rows, width=width)
    text += printed(print_step_flows, step_flows(spec, plan, rows), width=width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "Communication groups of fsdp2 hybrid ulysses4 dp8" in flat
    assert "ulysses: ranks that share a sequence; shards: ranks that divide the states" in flat
    assert "Bytes of a step, GB" in flat
    for word in ("tp1", "pp1", "pipeline"):
        assert word not in text
