import pytest

from tests.hosts.machines import cluster, recorded
from topoplan.hosts.differences import differences, named


def test_equal_hosts_have_none() -> None:
    assert differences(cluster("dgx-h100", "dgx-h100", "dgx-h100")) == ()
    assert differences(cluster("dgx-h100")) == ()


@pytest.mark.parametrize(
    ("section", "text", "name", "what"),
    [
        ("gpus", recorded("dgx-h100", "gpus.csv").replace("550.90.07", "535.1.1"), "driver", "535.1.1 on node2"),
        ("gpus", "\n".join(recorded("dgx-h100", "gpus.csv").splitlines()[:-1]), "gpu-count", "7 on node2"),
        ("meminfo", "MemTotal: 1056726636 kB\n", "memory", "GiB on node2"),
        ("versions", "python\t3.12.1\ntorch\t2.6.0+cu124\ncuda\t12.4\nnccl\t2.21.5\n", "version-python", "3.12.1 on"),
        ("versions", "python\t3.11.9\ntorch\t2.6.0+cu124\n", "version-nccl", "not known on node2"),
        (
            "adapters",
            recorded("dgx-h100", "adapters.txt").replace("400 Gb", "200 Gb"),
            "adapter-rate",
            "200Gb/s on node2",
        ),
        (
            "adapter-mtus",
            recorded("dgx-h100", "ibv_devinfo.txt").replace("4096 (5)", "2048 (4)"),
            "adapter-mtu",
            "2048",
        ),
        ("nvlink", "", "nvlink", "not known on node2"),
    ],
)
def test_each_difference_is_told_with_the_odd_host(section: str, text: str, name: str, what: str) -> None:
    found = {check.name: check for check in differences(cluster(*["dgx-h100"] * 3, changes={2: {section: text}}))}
    assert what in found[name].what
    assert found[name].outcome == "warning"
    assert found[name].host == ""
    assert found[name].remedy


def test_a_little_less_memory_is_no_difference() -> None:
    assert differences(cluster("dgx-h100", "dgx-h100", changes={1: {"meminfo": "MemTotal: 2113400000 kB\n"}})) == ()


def test_different_cards_are_a_failure() -> None:
    found = {check.name: check for check in differences(cluster("dgx-h100", "hgx-h20"))}
    assert found["gpu-kind"].outcome == "failure"
    assert "NVIDIA H20 on node1" in found["gpu-kind"].what


def test_one_machine_under_two_names_is_found() -> None:
    system = {"system": "hostname\tsame\nboot_id\tone\npeermem\tyes\n"}
    found = differences(cluster("dgx-h100", "dgx-h100", changes={0: system, 1: system}))
    assert [check.name for check in found] == ["same-machine"]
    assert found[0].what == "node0, node1 are one machine, same"


def test_many_names_are_cut_short() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named(list("abcdefg")) == "a, b, c, d and 3 more"
