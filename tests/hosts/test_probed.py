from dataclasses import replace

import pytest

from tests.hosts.machines import cluster, facts
from topoplan.hosts.facts import AdapterFacts, HostFacts, RouteFacts
from topoplan.hosts.probe import compute_network, network_of, route_addresses, socket_interface, usable_address


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


@pytest.mark.parametrize(
    ("machine", "kind", "count", "gbit_per_s", "near"),
    [
        ("dgx-h100", "infiniband", 8, 400, True),
        ("dgx-a100", "infiniband", 8, 200, True),
        ("hgx-b200", "infiniband", 8, 400, True),
        ("hgx-h20", "roce", 8, 200, True),
        ("h100-4gpu", "infiniband", 4, 200, True),
        ("gb200-tray", "infiniband", 4, 400, False),
        ("l40s-pcie", "roce", 1, 100, False),
        ("rtx4090-pcie", "ethernet", 0, 25, False),
    ],
)
def test_the_network_of_each_machine(machine: str, kind: str, count: int, gbit_per_s: float, near: bool) -> None:
    network = compute_network(facts(machine), "bond0")
    assert (network.kind, len(network.adapters), network.near_gpus) == (kind, count, near)
    assert network.rate_bytes_per_s == gbit_per_s * 1e9 / 8


def test_storage_adapters_are_left_out_with_the_reason() -> None:
    network = compute_network(facts("dgx-h100"), "bond0")
    assert network.hcas == tuple(f"mlx5_{index}:1" for index in (0, 3, 4, 5, 6, 9, 10, 11))
    assert dict(network.left_out) == {
        "mlx5_1": "NODE to every GPU",
        "mlx5_7": "NODE to every GPU",
        "mlx5_2": "port 1 is DOWN",
        "mlx5_8": "port 1 is DOWN",
    }


def test_without_a_matrix_most_of_the_bandwidth_counts() -> None:
    network = compute_network(replace(facts("dgx-h100"), topology=None), "bond0")
    assert len(network.adapters) == 8
    assert dict(network.left_out)["mlx5_1"] == "link layer Ethernet"


def test_a_slower_port_beside_the_others_is_left_out() -> None:
    found = facts("h100-4gpu")
    first, *others = found.adapters or ()
    slow = replace(first, rate_bytes_per_s=12.5e9)
    network = compute_network(replace(found, adapters=(slow, *others)), "bond0")
    assert len(network.adapters) == 3
    assert dict(network.left_out) == {"mlx5_0": "100 Gb/s"}


def test_adapters_that_nccl_does_not_drive_by_verbs_are_not_named() -> None:
    efa = AdapterFacts(device="rdmap16s27", port=1, link_layer="Unspecified", state="ACTIVE", rate_bytes_per_s=12.5e9)
    network = compute_network(HostFacts(adapters=(efa,)), "eth0")
    assert (network.kind, network.nics, network.hcas) == ("efa", 1, ())


def test_a_host_that_says_nothing_has_sockets_of_unknown_speed() -> None:
    network = compute_network(HostFacts(), "eth0")
    assert (network.kind, network.rate_bytes_per_s) == ("ethernet", None)
