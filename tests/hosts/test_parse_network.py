import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import MACHINES, RECORDED, recorded
from topoplan.hosts.parse_network import (
    parse_adapters,
    parse_default_interface,
    parse_interfaces,
    parse_listening,
    parse_mtus,
    parse_rate,
    parse_route,
)

ADDR = """[{"ifindex":1,"ifname":"lo","flags":["LOOPBACK","UP","LOWER_UP"],"mtu":65536,"operstate":"UNKNOWN",
"addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8},{"family":"inet6","local":"::1","prefixlen":128}]},
{"ifindex":2,"ifname":"bond0","flags":["BROADCAST","MASTER","UP","LOWER_UP"],"mtu":9000,"operstate":"UP",
"addr_info":[{"family":"inet","local":"10.1.2.3","prefixlen":24}]},{"ifindex":3,"ifname":"eth9","flags":["BROADCAST"],
"mtu":1500,"operstate":"DOWN","addr_info":[]},{}]"""


class TestParseInterfaces:
    def test_reads_json_with_speeds(self) -> None:
        lo, bond, eth = parse_interfaces(ADDR, "lo\t-1\nbond0\t25000\n")
        assert (lo.addresses, lo.is_up, lo.speed_bytes_per_s) == (("127.0.0.1", "::1"), True, None)
        assert (bond.mtu_bytes, bond.is_up, bond.speed_bytes_per_s) == (9000, True, 25e9 / 8)
        assert not eth.is_up


class TestParseDefaultInterface:
    def test_takes_the_lowest_metric(self) -> None:
        routes = '[{"dst":"default","dev":"wlan0","metric":600},{"dst":"default","dev":"eth0","metric":100}]'
        assert parse_default_interface(routes) == "eth0"

    def test_may_find_none(self) -> None:
        assert parse_default_interface("") == parse_default_interface("[]") == ""


class TestParseRoute:
    def test_joins_the_name_and_the_route(self) -> None:
        text = "asked\tnode1\n10.1.2.4 STREAM node1\n10.1.2.4 DGRAM\n@route\n"
        route = parse_route(text + '[{"dst":"10.1.2.4","dev":"bond0","prefsrc":"10.1.2.3"}]')
        assert (route.address, route.resolved, route.interface, route.source) == (
            "node1",
            ("10.1.2.4",),
            "bond0",
            "10.1.2.3",
        )

    def test_keeps_a_name_that_nobody_knows(self) -> None:
        route = parse_route("asked\tnowhere\n\n")
        assert (route.address, route.resolved, route.interface) == ("nowhere", (), "")

    def test_an_ipv6_address_is_its_own_answer(self) -> None:
        route = parse_route('asked\tfd00::7\n@route\n[{"dst":"fd00::7","dev":"eth1","prefsrc":"fd00::1"}]')
        assert (route.resolved, route.interface) == (("fd00::7",), "eth1")


def test_listening_ports_of_proc() -> None:
    assert parse_listening("00000000:0016\n0100007F:733C\n00000000000000000000000001000000:0016\n") == {22, 29500}


@given(st.text(max_size=200))
def test_garbage_never_raises(text: str) -> None:
    parse_interfaces(text, text)
    parse_interfaces("[" * 5000)
    parse_interfaces('[{"ifname":"x","addr_info":3,"mtu":"?"}]')
    parse_default_interface(text)
    parse_default_interface('[{"dev":1},{"metric":[]}]')
    parse_route(text)
    parse_route("asked\tx\n@route\n" + text)
    parse_listening(text)
    parse_adapters(text)
    parse_adapters("mlx5_0 1 port\t1\nmlx5_0 1 gid 0\tx\nmlx5_0 " + text)
    parse_mtus(text)
    parse_rate(text)


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
