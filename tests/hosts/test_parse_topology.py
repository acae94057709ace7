import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import MACHINES, recorded
from topoplan.hosts.parse_topology import parse_topology


def test_a_dgx_h100_has_nics_by_their_names() -> None:
    found = parse_topology(recorded("dgx-h100", "topology.txt"))
    assert found.links["GPU0", "GPU7"] == "NV18"
    assert found.links["GPU3", "mlx5_5"] == found.links["mlx5_5", "GPU3"] == "PXB"
    assert found.links["mlx5_1", "mlx5_2"] == "PIX"
    assert found.links["GPU0", "mlx5_11"] == "SYS"
    assert found.numa_nodes == {**dict.fromkeys(range(4), 0), **dict.fromkeys(range(4, 8), 1)}
    assert not any("NIC" in device for pair in found.links for device in pair)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_matrix_is_whole_and_symmetric(machine: str) -> None:
    links = parse_topology(recorded(machine, "topology.txt")).links
    devices = {device for pair in links for device in pair}
    assert len(links) == len(devices) * (len(devices) - 1)
    assert all(links[two, one] == link for (one, two), link in links.items())


def test_columns_that_run_together_are_told_apart() -> None:
    text = recorded("hgx-b200", "topology.txt")
    assert "SYSSYS" in text
    links = parse_topology(text).links
    assert links["GPU0", "mlx5_15"] == "SYS"
    assert links["GPU0", "mlx5_4"] == "PIX"


def test_an_old_driver_names_the_nic_in_its_column() -> None:
    found = parse_topology(recorded("titan-old-driver", "topology.txt"))
    assert found.links["GPU4", "mlx5_0"] == "PHB"
    assert found.numa_nodes == {}


def test_the_first_memory_of_a_grace_cpu_is_its_own() -> None:
    assert parse_topology(recorded("gb200-tray", "topology.txt")).numa_nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_row_that_is_cut_is_left_out() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\n"
    assert parse_topology(text).links == {("GPU0", "GPU1"): "PHB"}


@given(st.text(max_size=200))
def test_garbage_gives_nothing_and_never_raises(text: str) -> None:
    parse_topology(text)
    parse_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0" + text)
