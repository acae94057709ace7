from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.scenes import ROUTABLE, adapter, address, cluster, facts, needs, outcome, roce, scene, see
from topoplan.hosts import check_network as checks
from topoplan.hosts.facts import AdapterFacts, HostFacts, InterfaceFacts, RouteFacts
from topoplan.hosts.scene import Look, Scene
from topoplan.specs.cluster import Cluster, Fabric

ACROSS = (
    checks.master_name,
    checks.interface,
    checks.address,
    checks.mtu,
    checks.port_range,
    checks.adapters,
    checks.gid,
    checks.peermem,
)


def route(**changes: Any) -> tuple[RouteFacts, ...]:
    made = RouteFacts(address=address(0), resolved=(address(0),), interface="eth0", source=address(1))
    return (replace(made, **changes),)


def second(of: Cluster | None = None, **changes: Any) -> Scene:
    """The second of three hosts differs."""
    return scene(facts(0), facts(1, **changes), facts(2), of=of or cluster(nodes=3))


def named(**changes: Any) -> Cluster:
    """A cluster whose spec says more of its hosts."""
    place = cluster(nodes=3)
    return replace(place, hosts=tuple(replace(host, **changes) for host in place.hosts))


def interfaces(*more: InterfaceFacts, **changes: Any) -> tuple[InterfaceFacts, ...]:
    made = InterfaceFacts(name="eth0", addresses=(address(1),), mtu_bytes=9000, is_up=True)
    return (replace(made, **changes), *more)


@pytest.mark.parametrize("look", ACROSS)
def test_one_node_has_no_network(look: Look) -> None:
    assert outcome(look, scene(facts())) is None


@pytest.mark.parametrize("look", ACROSS)
def test_hosts_that_are_ready_pass(look: Look) -> None:
    expected = None if look is checks.gid else "ok"
    assert [outcome(look, scene(), number) for number in range(2)] == [expected, expected]


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
    assert outcome(checks.master_name, scene(facts(0, routes=own), facts(1))) == "warning"


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
    assert outcome(checks.interface, second(named(socket_interface=wanted), **changes), 1) == expected


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    found = see(checks.interface, second(named(socket_interface="ib0")), 1)
    assert found is not None
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
    assert outcome(checks.address, scene(*hosts)) == "warning"
    told = replace(cluster(), hosts=tuple(replace(host, socket_interface="eth0") for host in cluster().hosts))
    assert outcome(checks.address, scene(*hosts, of=told)) == "ok"
    assert outcome(checks.address, second(interfaces=None), 1) == "skipped"


def test_a_container_behind_the_bridge_of_docker() -> None:
    behind = {"routes": route(source="172.17.0.3"), "interfaces": interfaces(addresses=("172.17.0.3",))}
    found = see(checks.address, second(in_container=True, **behind), 1)
    assert found is not None
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
    of = scene(facts(0, **changes), facts(1), wanted=needs())
    assert outcome(checks.master_port, of) == expected
    assert outcome(checks.master_port, of, 1) is None
    assert outcome(checks.master_port, scene(facts(0, **changes))) is None


@pytest.mark.parametrize(("ports", "expected"), [((40000, 40100), "warning"), ((5, 4), "warning"), (None, "skipped")])
def test_few_ports_for_connections(ports: Any, expected: str) -> None:
    assert outcome(checks.port_range, second(port_range=ports), 1) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((adapter(0), adapter(1)), "ok"),
        ((adapter(0), adapter(1), adapter(2, rate_bytes_per_s=1.25e9)), "ok"),
        ((adapter(0), adapter(1, state="DOWN")), "warning"),
        ((adapter(0, state="DOWN"), adapter(1, state="INIT")), "failure"),
        ((), "failure"),
        ((adapter(0), adapter(1, rate_bytes_per_s=12.5e9)), "warning"),
        ((adapter(0), adapter(1, rate_bytes_per_s=None)), "ok"),
        ((roce(0), roce(1)), "warning"),
        (None, "skipped"),
    ],
)
def test_rdma_adapters(found: tuple[AdapterFacts, ...] | None, expected: str) -> None:
    assert outcome(checks.adapters, second(adapters=found), 1) == expected
    assert outcome(checks.adapters, second(cluster(nodes=3, kind="ethernet"), adapters=found), 1) is None


@pytest.mark.parametrize(
    ("hcas", "expected"),
    [(("mlx5_0:1",), "ok"), (("mlx5_0", "mlx5_1"), "warning"), (("mlx5_7",), "failure"), (("mlx5_1",), "failure")],
)
def test_adapters_that_the_spec_names(hcas: tuple[str, ...], expected: str) -> None:
    down = (adapter(0), adapter(1, state="DOWN"), adapter(10))
    assert outcome(checks.adapters, second(named(hcas=hcas), adapters=down), 1) == expected


V1 = {0: (ROUTABLE, "IB/RoCE v1")}


@pytest.mark.parametrize(
    ("gids", "env", "nccl", "expected"),
    [
        (None, {}, "2.21.5", "ok"),
        (None, {}, "2.20.5", "warning"),
        (None, {}, "", "ok"),
        (V1, {}, "2.21.5", "failure"),
        (None, {"NCCL_IB_GID_INDEX": "3"}, "2.20.5", "ok"),
        (None, {"NCCL_IB_GID_INDEX": "0"}, "2.21.5", "failure"),
        ({}, {}, "2.21.5", "skipped"),
    ],
)
def test_roce_addresses(gids: Any, env: dict[str, str], nccl: str, expected: str) -> None:
    changes = {} if gids is None else {"gids": gids}
    ports = tuple(replace(roce(index), **changes) for index in range(2))
    versions = {"nccl": nccl} if nccl else {}
    place = cluster(nodes=3, kind="roce", env=env)
    assert outcome(checks.gid, second(place, adapters=ports, versions=versions), 1) == expected


@pytest.mark.parametrize(
    ("peermem", "kernel", "expected"),
    [
        (True, "4.18.0", "ok"),
        (False, "5.15.0-105-generic", "ok"),
        (False, "5.4.0", "warning"),
        (False, "", "warning"),
        (None, "5.4.0", "skipped"),
    ],
)
def test_gpudirect(peermem: bool | None, kernel: str, expected: str) -> None:
    assert outcome(checks.peermem, second(peermem=peermem, kernel=kernel), 1) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ok"),
        ({"NCCL_IB_TC": "106"}, "warning"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_ALGO": "Ring"}, "warning"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, "ok"),
    ],
)
def test_settings_of_nccl_on_one_host(settings: dict[str, str], expected: str) -> None:
    assert outcome(checks.nccl_settings, second(nccl_settings=settings), 1) == expected


def test_settings_that_all_hosts_have_are_shown() -> None:
    hosts = [facts(number, nccl_settings={"NCCL_IB_TC": "106", "NCCL_P2P_DISABLE": "0"}) for number in range(2)]
    found = see(checks.nccl_settings, scene(*hosts))
    assert found is not None
    assert found.outcome == "ok"
    assert "NCCL_IB_TC=106" in found.what


def test_settings_that_the_spec_overrides_do_not_count() -> None:
    place = cluster(nodes=3, env={"NCCL_ALGO": "Tree"})
    assert outcome(checks.nccl_settings, second(place, nccl_settings={"NCCL_ALGO": "Ring"}), 1) == "ok"


def test_the_address_for_the_others() -> None:
    of = second(named(socket_interface="eth0"), interfaces=interfaces(addresses=("fe80::7", "10.5.5.5")))
    assert checks.fabric_address(of, of.nodes[1]) == "10.5.5.5"
    of = second()
    assert checks.fabric_address(of, of.nodes[1]) == address(1)
    silent: HostFacts = HostFacts()
    of = scene(silent, silent)
    assert checks.fabric_address(of, of.nodes[1]) == address(1)


def roce_scene(*classes: int | None, of: Cluster | None = None, **changes: Any) -> Scene:
    """Hosts whose adapters have these traffic classes set."""
    of = of or cluster(nodes=len(classes), kind="roce")
    said = [
        facts(n, adapters=(roce(0, traffic_class=one), roce(1, traffic_class=one)), **changes)
        for n, one in enumerate(classes)
    ]
    return scene(*said, of=of)


def asking(value: int, nodes: int = 2) -> Cluster:
    return cluster(nodes=nodes, fabric=Fabric(kind="roce", traffic_class=value))


def test_a_traffic_class_that_nobody_names_cannot_be_judged() -> None:
    assert outcome(checks.traffic_class, roce_scene(None, None)) == "skipped"
    assert outcome(checks.traffic_class, scene()) is None


def test_the_traffic_class_of_spec_or_host_is_told() -> None:
    found = see(checks.traffic_class, roce_scene(None, None, of=asking(106)))
    assert found is not None
    assert (found.outcome, found.what) == ("ok", "traffic class 106 (DSCP 26)")
    assert outcome(checks.traffic_class, roce_scene(106, 106)) == "ok"
    assert outcome(checks.traffic_class, roce_scene(106, 106, of=asking(106))) == "ok"
    by_env = cluster(kind="roce", env={"NCCL_IB_TC": "106"})
    assert outcome(checks.traffic_class, roce_scene(None, None, of=by_env)) == "ok"


def test_a_host_that_sends_with_another_traffic_class_is_a_warning() -> None:
    found = see(checks.traffic_class, roce_scene(236, 236, of=asking(106)))
    assert found is not None
    assert (found.outcome, "traffic_class: 236" in found.remedy) == ("warning", True)
    assert outcome(checks.traffic_class, roce_scene(106, 106, 96), 2) == "warning"
    mixed = facts(0, adapters=(roce(0, traffic_class=106), roce(1)))
    assert outcome(checks.traffic_class, scene(mixed, facts(1), of=cluster(kind="roce"))) == "warning"


def test_adapters_of_efa_are_counted_and_need_no_gpudirect_module() -> None:
    place = cluster(kind="efa")
    efa = tuple(adapter(index, device=f"rdmap{index}s0", link_layer="Unknown") for index in range(2))
    hosts = scene(*(facts(n, adapters=efa, peermem=False) for n in range(2)), of=place)
    assert outcome(checks.adapters, hosts) == "ok"
    assert outcome(checks.gid, hosts) is None
    assert outcome(checks.peermem, hosts) is None
    assert outcome(checks.adapters, scene(*(facts(n, adapters=efa) for n in range(2)), of=cluster())) == "warning"


def test_settings_of_googles_profile_are_no_left_overs_of_debugging() -> None:
    profile = {"NCCL_PROTO": "Simple,LL128", "NCCL_BUFFSIZE": "8388608", "NCCL_FASTRAK_NUM_FLOWS": "2"}
    said = (facts(0, nccl_settings=profile), facts(1, nccl_settings=profile))
    assert outcome(checks.nccl_settings, scene(*said, of=cluster(kind="tcpxo"))) == "ok"
    del profile["NCCL_FASTRAK_NUM_FLOWS"]
    assert outcome(checks.nccl_settings, scene(*said)) == "warning"
