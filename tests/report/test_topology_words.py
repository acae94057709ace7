import pytest

from tests.network.clusters import cluster_of
from topoplan.report.topology_words import (
    domain_nodes,
    fabric_words,
    leaves_words,
    numbers,
    nvlink_words,
    rate_words,
    sockets_words,
    spine_words,
    title,
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
