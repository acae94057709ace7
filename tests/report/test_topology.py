import json

import pytest

from tests.network.clusters import cluster_of
from tests.planner.sharded_cases import DENSE, plan_of
from tests.planner.test_communication import layout_of
from tests.report.printed import printed
from topoplan.planner.communication import group_links, step_flows
from topoplan.report.topology import (
    domain_nodes,
    fabric_words,
    leaves_words,
    members,
    numbers,
    nvlink_words,
    print_groups,
    print_step_flows,
    print_topology,
    rate_words,
    sockets_words,
    spine_words,
    title,
    topology_to_dict,
)


def test_rates_are_in_the_units_of_the_vendors() -> None:
    assert rate_words("nvlink", 450e9) == "900GB/s"
    assert rate_words("nic", 50e9) == "400Gb/s"
    assert rate_words("pcie", 63e9) == "63GB/s"


@pytest.mark.parametrize(("values", "words"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2], "0, 2"), (range(2, 4), "2-3")])
def test_numbers_in_a_row_are_a_range(values: list[int], words: str) -> None:
    assert numbers(values) == words


def test_the_fabric_in_words() -> None:
    cluster = cluster_of(nodes=32, rails=8, nodes_per_leaf=16, oversubscription=2.0, kind="roce")
    assert title(cluster).endswith("32 nodes x 8 h100-sxm-80gb, 256 GPUs")
    assert fabric_words(cluster) == "RoCE, 8 x 400Gb/s per node, 5us from NIC to NIC"
    assert leaves_words(cluster) == "16 leaf switches, 8 rails, 16 nodes on each"
    assert spine_words(cluster) == "spine, 3200Gb/s a leaf, 2:1 oversubscribed"
    assert leaves_words(cluster_of(nodes=4, nodes_per_leaf=4)) == "1 leaf switch, all nodes on it"
    assert leaves_words(cluster_of(nodes=4)) == "one network, non-blocking for all nodes"
    assert spine_words(cluster_of(nodes=4)) == ""


def test_the_machine_in_words() -> None:
    assert nvlink_words(cluster_of(nodes=1)) == "NVSwitch, 900GB/s per GPU"
    rack = cluster_of("gb200-nvl72-186gb", nodes=36, gpus_per_node=4)
    assert nvlink_words(rack) == "NVSwitch, 1.8TB/s per GPU, over 18 nodes"
    box = cluster_of("a100-pcie-80gb", nodes=1)
    assert (nvlink_words(box), domain_nodes(box)) == ("", 0)
    assert sockets_words(box) == "CPU 0 (PCIe 0), CPU 1 (PCIe 1), 31.5GB/s a switch, 17GB/s between sockets"


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


CLUSTERS = {
    "box": cluster_of(nodes=1),
    "rails": cluster_of(nodes=32, rails=8, nodes_per_leaf=16, oversubscription=2.0),
    "pcie": cluster_of("a100-pcie-80gb", nodes=2),
    "rack": cluster_of("gb200-nvl72-186gb", nodes=36, gpus_per_node=4),
    "one": cluster_of(nodes=3, gpus_per_node=1),
    "wide": cluster_of("gb200-nvl72-186gb", nodes=1, gpus_per_node=72),
    "large": cluster_of(nodes=2048),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_frame_is_straight_and_fits(name: str) -> None:
    lines = printed(print_topology, CLUSTERS[name]).splitlines()
    assert max(map(len, lines)) <= 100
    framed = [line for line in lines if line[:1] in "╭│╰" and line[-1:] in "╮│╯" and len(line) > 30]
    assert len({len(line) for line in framed}) == 1
    assert len(lines) < 40 or name == "wide"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_gpu_and_nic_of_a_node_is_in_it(name: str) -> None:
    cluster, text = CLUSTERS[name], printed(print_topology, CLUSTERS[name])
    assert f"PCIe {(cluster.gpus_per_node + 1) // 2 - 1}" in text or not cluster.nvlink_bytes_per_s
    assert str(cluster.gpus_per_node - 1) in text
    assert ("NIC " in text) == (cluster.nodes > 1)


def test_the_network_is_above_the_node() -> None:
    lines = printed(print_topology, CLUSTERS["rails"]).splitlines()
    order = ["spine, 3200Gb/s", "16 leaf switches", "InfiniBand, 8 x 400Gb/s", "one of 32 nodes", "NIC 0-1", "GPU 0-1"]
    places = [next(number for number, line in enumerate(lines) if words in line) for words in order]
    assert places == sorted(places)


def test_a_terminal_without_line_drawing_gets_ascii() -> None:
    assert not printed(print_topology, CLUSTERS["rails"]).isascii()
    assert printed(print_topology, CLUSTERS["rails"], encoding="ascii").isascii()


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
