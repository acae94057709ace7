from hypothesis import given
from hypothesis import strategies as st

from topoplan.hosts.parse_ip import parse_default_interface, parse_interfaces, parse_listening, parse_route

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
