import json

from tests.network.clusters import cluster_of
from tests.planner.sharded_cases import DENSE, plan_of
from tests.planner.test_communication import layout_of
from topoplan.planner.communication import group_links, step_flows
from topoplan.report.topology_document import topology_to_dict


def test_one_node_stands_for_all_with_its_count() -> None:
    cluster = cluster_of(nodes=32, rails=8, nodes_per_leaf=16)
    view = topology_to_dict(cluster, None, ())
    assert view["schema"] == "topoplan.topology/1"
    counts = {vertex["id"]: vertex["count"] for vertex in view["nodes"]}
    assert counts["node0.gpu7"] == 32
    assert counts["domain0.nvswitch"] == 32
    assert counts["leaf0.plane7"] == 2
    assert counts["spine"] == 1
    links = {tuple(link["ends"]): link for link in view["links"]}
    assert links["node0.nic0", "leaf0.plane0"]["rate_bytes_per_s"] == 50e9
    assert links["leaf0.plane0", "spine"]["count"] == 2
    assert len(links) == len(view["links"])
    assert all(set(ends) <= set(counts) for ends in links)
    assert "groups" not in view


def test_a_layout_brings_its_groups() -> None:
    cluster, layout = cluster_of(nodes=4), layout_of(tp=8, dp=4)
    view = topology_to_dict(cluster, layout, group_links(cluster, layout))
    assert view["layout"] == {"tp": 8, "pp": 1, "cp": 1, "dp": 4, "ep": 1, "etp": 1}
    assert [row["name"] for row in view["groups"]] == ["tp", "dp"]
    dp = view["groups"][1]
    assert dp["worst"] == [0, 8, 16, 24]
    assert dp["tightest"] == "nic"
    json.dumps(view, allow_nan=False)


def test_a_plan_that_splits_data_alone_brings_the_bytes_of_a_step() -> None:
    spec, plan = plan_of(DENSE, {"backend": "fsdp2", "ulysses": 4, "sharding": "hybrid"}, {})
    rows = group_links(spec.cluster, plan.layout)
    view = topology_to_dict(spec.cluster, plan.layout, rows, step_flows(spec, plan, rows))
    assert view["layout"] == {"backend": "fsdp2", "sharding": "hybrid", "ulysses": 4, "cp": 1, "dp": 8}
    assert [row["name"] for row in view["groups"]] == ["ulysses", "shards", "replicas"]
    assert {row["group"] for row in view["step"]} == {"ulysses", "shards", "replicas"}
    assert all(row["member_bytes"] > 0 and row["links"] for row in view["step"])
    json.dumps(view, allow_nan=False)
