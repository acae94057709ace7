from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.fleets import adapter, address, cluster, facts, fleet, needs, outcome, second, see, told
from topoplan.hosts.facts import HostFacts, InterfaceFacts, RouteFacts
from topoplan.hosts.preflight import adapters
from topoplan.hosts.preflight import interfaces as checks
from topoplan.hosts.preflight.fleet import Check

ACROSS = (
    checks.master_name,
    checks.interface,
    checks.address,
    checks.mtu,
    checks.port_range,
    adapters.adapters,
    adapters.gid,
    adapters.peermem,
)


def route(**changes: Any) -> tuple[RouteFacts, ...]:
    made = RouteFacts(address=address(0), resolved=(address(0),), interface="eth0", source=address(1))
    return (replace(made, **changes),)


def interfaces(*more: InterfaceFacts, **changes: Any) -> tuple[InterfaceFacts, ...]:
    made = InterfaceFacts(name="eth0", addresses=(address(1),), mtu_bytes=9000, is_up=True)
    return (replace(made, **changes), *more)


@pytest.mark.parametrize("check", ACROSS)
def test_one_node_has_no_network(check: Check) -> None:
    assert outcome(check, fleet(facts())) is None


@pytest.mark.parametrize("check", ACROSS)
def test_hosts_that_are_ready_pass(check: Check) -> None:
    expected = None if check is adapters.gid else "ok"
    assert [outcome(check, fleet(), number) for number in range(2)] == [expected, expected]


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        (route(), "ok"),
        (route(resolved=()), "failure"),
        (route(resolved=("127.0.1.1",)), "failure"),
        (route(resolved=("10.9.9.9",)), "warning"),
        ((), "skipped"),
    ],
)
def test_the_name_of_node_0(routes: tuple[RouteFacts, ...], expected: str) -> None:
    assert outcome(checks.master_name, second(routes=routes), 1) == expected


def test_node_0_that_takes_itself_for_loopback_is_a_warning() -> None:
    own = route(resolved=("127.0.1.1",), interface="lo", source="127.0.0.1")
    assert outcome(checks.master_name, fleet(facts(0, routes=own), facts(1))) == "warning"


@pytest.mark.parametrize(
    ("wanted", "changes", "expected"),
    [
        (None, {}, "ok"),
        (None, {"routes": route(interface="")}, "failure"),
        (None, {"routes": ()}, "skipped"),
        ("eth0", {}, "ok"),
        ("ib0", {}, "failure"),
        ("eth0", {"interfaces": interfaces(is_up=False)}, "failure"),
        ("eth0", {"interfaces": interfaces(addresses=())}, "failure"),
        ("eth0", {"routes": route(interface="bond0")}, "warning"),
        ("eth0", {"interfaces": None}, "skipped"),
    ],
)
def test_the_interface_of_the_sockets(wanted: str | None, changes: dict[str, Any], expected: str) -> None:
    assert outcome(checks.interface, second(told(socket_interface=wanted), **changes), 1) == expected


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    found = see(checks.interface, second(told(socket_interface="ib0")), 1)
    assert found.what == "no interface ib0, but eth0, docker0"
    assert "eth0 leads to node 0" in found.remedy


def test_plain_sockets_over_a_slow_interface() -> None:
    slow = interfaces(speed_bytes_per_s=1.25e8)
    assert outcome(checks.interface, second(cluster(nodes=3, kind="ethernet"), interfaces=slow), 1) == "warning"
    assert outcome(checks.interface, second(interfaces=slow), 1) == "ok", "RDMA does not go through it"


def test_an_address_that_two_hosts_have() -> None:
    same = interfaces(addresses=(address(0),))
    assert outcome(checks.address, second(interfaces=same, routes=route(source=address(0))), 1) == "failure"
    bridge = InterfaceFacts(name="br-1f", addresses=("172.18.0.1",), is_up=True)
    hosts = [facts(number, interfaces=interfaces(bridge, addresses=(address(number),))) for number in range(2)]
    assert outcome(checks.address, fleet(*hosts)) == "warning"
    one_way = replace(cluster(), hosts=tuple(replace(host, socket_interface="eth0") for host in cluster().hosts))
    assert outcome(checks.address, fleet(*hosts, of=one_way)) == "ok"
    assert outcome(checks.address, second(interfaces=None), 1) == "skipped"


def test_a_container_behind_the_bridge_of_docker() -> None:
    behind = {"routes": route(source="172.17.0.3"), "interfaces": interfaces(addresses=("172.17.0.3",))}
    found = see(checks.address, second(in_container=True, **behind), 1)
    assert found.outcome == "failure"
    assert "--network host" in found.remedy
    assert outcome(checks.address, second(in_container=False, **behind), 1) == "ok"


def test_frames_of_another_size() -> None:
    assert outcome(checks.mtu, second(interfaces=interfaces(mtu_bytes=1500)), 1) == "warning"
    assert outcome(checks.mtu, second(interfaces=interfaces(mtu_bytes=1500)), 0) == "ok"
    small = tuple(adapter(index, active_mtu_bytes=1024) for index in range(2))
    assert outcome(checks.mtu, second(adapters=small), 1) == "warning"
    assert outcome(checks.mtu, second(interfaces=None, adapters=None), 1) == "skipped"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"listening_ports": frozenset({22, 23456})}, "failure"),
        ({"port_range": (10000, 60999)}, "warning"),
        ({"listening_ports": None}, "skipped"),
    ],
)
def test_the_port_of_the_rendezvous(changes: dict[str, Any], expected: str) -> None:
    of = fleet(facts(0, **changes), facts(1), wanted=needs())
    assert outcome(checks.master_port, of) == expected
    assert outcome(checks.master_port, of, 1) is None
    assert outcome(checks.master_port, fleet(facts(0, **changes))) is None


def test_a_port_that_is_taken_names_the_run_that_is_recorded_there() -> None:
    def remedy(**changes: Any) -> str:
        of = fleet(facts(0, listening_ports=frozenset({23456})), facts(1), wanted=needs(**changes))
        found = checks.master_port(of, of.nodes[0])
        assert found is not None
        return found.remedy

    first = fleet(facts(0)).nodes[0].host.address
    assert "`topoplan runs stop a-run-1`" in remedy(earlier_runs={first: "a-run-1"})
    assert "`topoplan runs stop ID`" in remedy(earlier_runs={"elsewhere": "a-run-1"})


@pytest.mark.parametrize(("ports", "expected"), [((40000, 40100), "warning"), ((5, 4), "warning"), (None, "skipped")])
def test_few_ports_for_connections(ports: Any, expected: str) -> None:
    assert outcome(checks.port_range, second(port_range=ports), 1) == expected


def test_the_address_for_the_others() -> None:
    of = second(told(socket_interface="eth0"), interfaces=interfaces(addresses=("fe80::7", "10.5.5.5")))
    assert checks.fabric_address(of, of.nodes[1]) == "10.5.5.5"
    of = second()
    assert checks.fabric_address(of, of.nodes[1]) == address(1)
    not_reported: HostFacts = HostFacts()
    of = fleet(not_reported, not_reported)
    assert checks.fabric_address(of, of.nodes[1]) == address(1)
