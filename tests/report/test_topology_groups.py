from io import StringIO

import pytest
from rich.console import Console

from tests.layout.clusters import cluster_of
from tests.planner.test_communication import layout_of
from topoplan.layout.layout import Layout
from topoplan.planner.communication import group_links
from topoplan.report.topology_groups import members, print_groups
from topoplan.specs.cluster import Cluster


def table(cluster: Cluster, layout: Layout) -> str:
    console = Console(file=StringIO(), width=100, color_system=None)
    print_groups(console, layout, group_links(cluster, layout))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_row_a_kind_with_its_tightest_link() -> None:
    text = table(cluster_of(nodes=4), layout_of(tp=8, dp=4))
    (dp,) = [line for line in text.splitlines() if line.startswith("dp ")]
    assert dp.split()[1:3] == ["4", "8"]
    assert "NIC 400Gb/s" in dp
    assert dp.split()[-1] == "42.5"
    assert max(map(len, text.splitlines())) <= 100


def test_a_layout_without_groups_says_so() -> None:
    assert "none has more than one member" in table(cluster_of(nodes=1, gpus_per_node=1), layout_of(dp=1))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0, 1), "0, 1"), (range(8), "0-7"), ((0, 8, 16), "0, 8, 16"), (range(0, 64, 8), "0, 8, .. 56")],
)
def test_members_in_short(ranks: tuple[int, ...], words: str) -> None:
    assert members(ranks) == words
