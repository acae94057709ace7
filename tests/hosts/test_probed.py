from dataclasses import replace

from tests.hosts.machines import cluster
from topoplan.hosts.facts import RouteFacts
from topoplan.hosts.probe import network_of, route_addresses, socket_interface, usable_address


def test_every_host_is_asked_about_every_name_once() -> None:
    assert route_addresses([("node0", "10.0.0.1"), ("node1", "node1"), ("node2", "10.0.0.1")]) == (
        "node0",
        "10.0.0.1",
        "node1",
        "node2",
    )


def test_the_interface_is_the_one_that_leads_to_the_others() -> None:
    hosts = cluster("dgx-h100", "dgx-h100", interface="ens9")
    assert socket_interface(hosts[0], hosts) == ("ens9", ("ens9",))


def test_a_host_alone_has_that_of_its_default_route() -> None:
    hosts = cluster("dgx-h100")
    assert socket_interface(hosts[0], hosts) == ("bond0", ())


def test_the_users_name_stays_where_all_hosts_know_it() -> None:
    hosts = cluster("dgx-h100", "dgx-h100")
    assert usable_address(hosts[1], hosts) == "node1"


def test_a_name_of_the_ssh_configuration_alone_gives_way_to_an_address() -> None:
    hosts = [replace(one, hostname=f"10.0.0.{10 + index}") for index, one in enumerate(cluster("dgx-h100", "dgx-h100"))]
    known = tuple(
        RouteFacts(address=f"10.0.0.{end}", resolved=(f"10.0.0.{end}",), interface="bond0") for end in (10, 11)
    )
    hosts = [replace(one, facts=replace(one.facts, routes=known)) for one in hosts]
    assert usable_address(hosts[0], hosts) == "10.0.0.10"
    assert socket_interface(hosts[0], hosts)[0] == "bond0"


def test_a_name_that_means_loopback_to_its_own_host_is_of_no_use() -> None:
    hosts = cluster("dgx-h100", "dgx-h100")
    own = tuple(replace(route, resolved=("127.0.1.1",)) for route in hosts[0].facts.routes)
    everywhere = [replace(one, facts=replace(one.facts, routes=own)) for one in hosts]
    assert usable_address(everywhere[0], everywhere) == ""
    mixed = [everywhere[0], hosts[1]]
    assert usable_address(mixed[0], mixed) == ""


def test_the_network_is_that_of_the_socket_interface_without_rdma() -> None:
    hosts = cluster("rtx4090-pcie", "rtx4090-pcie")
    assert network_of(hosts[0], hosts).rate_bytes_per_s == 25e9 / 8
