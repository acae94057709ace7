import pytest

from tests.network.clusters import cluster_of
from tests.report.printed import printed
from topoplan.report.topology_picture import print_topology

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
