import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import MACHINES, RECORDED, recorded
from topoplan.hosts.parse_infiniband import parse_adapters, parse_mtus, parse_rate


def test_an_infiniband_port_has_its_interface_and_place() -> None:
    first = parse_adapters(recorded("dgx-h100", "adapters.txt"))[0]
    assert (first.device, first.port, first.link_layer, first.state) == ("mlx5_0", 1, "InfiniBand", "ACTIVE")
    assert first.rate_bytes_per_s == 50e9
    assert (first.interface, first.numa_node, first.pci_bus) == ("ibp24s0", 0, "0000:18:00.0")


def test_a_roce_bond_has_the_interface_of_its_gids() -> None:
    bond = parse_adapters(recorded("hgx-h20", "adapters.txt"))[3]
    assert (bond.device, bond.link_layer, bond.interface) == ("mlx5_bond_3", "Ethernet", "bond3")
    assert bond.gids[3] == ("0000:0000:0000:0000:0000:ffff:0a0a:030b", "RoCE v2")
    assert bond.gids[2][1] == "IB/RoCE v1"


def test_devices_come_in_the_order_of_their_numbers() -> None:
    devices = [one.device for one in parse_adapters(recorded("dgx-h100", "adapters.txt"))]
    assert devices == [f"mlx5_{index}" for index in range(12)]


def test_a_port_that_is_down_keeps_its_state() -> None:
    states = {one.device: one.state for one in parse_adapters(recorded("dgx-a100", "adapters.txt"))}
    assert states["mlx5_5"] == "DOWN"


def test_two_ports_of_one_function_have_interfaces_of_their_own() -> None:
    text = "mlx4_0 net 0\tib0\nmlx4_0 net 1\teth2\nmlx4_0 numa_node\t-1\n"
    text += "".join(f"mlx4_0 {port} port\t{port}\nmlx4_0 {port} state\t4: ACTIVE\n" for port in (1, 2))
    one, two = parse_adapters(text)
    assert (one.interface, two.interface) == ("ib0", "eth2")
    assert one.numa_node is None


def test_active_mtus_are_those_of_ibv_devinfo() -> None:
    mtus = parse_mtus(recorded("dgx-h100", "ibv_devinfo.txt"))
    assert mtus["mlx5_0", 1] == 4096
    assert mtus["mlx5_1", 1] == 1024
    adapters = parse_adapters(recorded("dgx-h100", "adapters.txt"), mtus)
    assert adapters[0].active_mtu_bytes == 4096


def test_every_recording_is_read() -> None:
    for machine in MACHINES:
        if (RECORDED / machine / "adapters.txt").exists():
            assert all(one.rate_bytes_per_s for one in parse_adapters(recorded(machine, "adapters.txt"))), machine


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400 Gb/sec (4X NDR)", 50e9), ("2.5 Gb/sec (1X SDR)", 0.3125e9), ("0 Gb/sec", None), ("fast", None), ("", None)],
)
def test_a_rate_is_in_bits(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


@given(st.text(max_size=200))
def test_garbage_never_raises(text: str) -> None:
    parse_adapters(text)
    parse_adapters("mlx5_0 1 port\t1\nmlx5_0 1 gid 0\tx\nmlx5_0 " + text)
    parse_mtus(text)
    parse_rate(text)
