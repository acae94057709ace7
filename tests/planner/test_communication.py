from __future__ import annotations

import pytest

from tests.layout.clusters import cluster_of
from topoplan.cost.collectives import ring_way
from topoplan.cost.profile import profile_of
from topoplan.layout.layout import Layout
from topoplan.layout.placement import group
from topoplan.planner.communication import group_links


def layout_of(**degrees: int) -> Layout:
    return Layout(**degrees, gradient_accumulation_steps=1)  # type: ignore[arg-type]


def test_every_kind_of_more_than_one_member_has_a_row() -> None:
    rows = group_links(cluster_of(nodes=4), layout_of(tp=4, pp=2, cp=2, dp=2, ep=4))
    assert [row.name for row in rows] == ["tp", "cp", "dp", "dp_cp", "ep", "edp", "pp"]
    assert [row.shape.size for row in rows] == [4, 2, 2, 4, 4, 4, 2]
    assert [row.groups for row in rows] == [8, 16, 16, 8, 8, 8, 16]
    assert group_links(cluster_of(nodes=1), layout_of(dp=8))[0].name == "dp"
    assert group_links(cluster_of(nodes=1, gpus_per_node=1), layout_of(dp=1)) == ()


def test_a_row_tells_what_the_group_crosses() -> None:
    tp, dp = group_links(cluster_of(nodes=4), layout_of(tp=8, dp=4))
    assert [one.kind for one in tp.crossings] == ["nvlink"]
    assert (tp.domains, dp.domains) == (1, 4)
    assert [one.kind for one in dp.crossings] == ["pcie", "nic"]
    assert dp.tightest.kind == "nic"
    assert dp.first == dp.worst == (0, 8, 16, 24)


def test_the_worst_group_is_named() -> None:
    (row,) = [
        row for row in group_links(cluster_of(nodes=2, gpus_per_node=6), layout_of(tp=4, dp=3)) if row.name == "tp"
    ]
    assert (row.first, row.worst) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("layout", [layout_of(tp=4, dp=8), layout_of(tp=2, pp=4, dp=4), layout_of(tp=8, dp=4)])
def test_the_rate_is_the_one_that_the_step_is_predicted_with(layout: Layout) -> None:
    cluster = cluster_of(nodes=4, rails=8, nodes_per_leaf=2, oversubscription=2.0)
    for row in group_links(cluster, layout):
        if row.pattern == "ring":
            way = ring_way(group(layout, row.name), cluster, profile_of(cluster.gpu))
            assert row.member_bytes_per_s == pytest.approx(way.rate_bytes_per_s)
