"""Checks of names, interfaces and ports, as far as a single host can tell; `connections` tries them out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from topoplan.hosts.facts import InterfaceFacts, RouteFacts
from topoplan.hosts.preflight.adapters import active_adapters
from topoplan.hosts.preflight.fleet import Fleet, Node, most_common, names
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.hosts.sections import address_of
from topoplan.units import format_bit_rate, named

_DOCKER = ipaddress.IPv4Network("172.17.0.0/16")
_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
_FULL_RATE = 0.95
"""Fraction of the rate in the spec; a lower rate means that the link trained to fewer lanes or a slower speed."""
_FEW_PORTS = 1000
"""A rank listens on several ports, and has a connection to each peer of its groups."""


def master_name(fleet: Fleet, node: Node) -> Result | None:
    """Row 5: the name of node 0 is unknown, or means the host itself (Debian's 127.0.1.1) or another machine."""
    if fleet.cluster.nodes == 1:
        return None
    address = fleet.master_address
    route = _route(fleet, node)
    if route is None:
        return node.not_reported("routes")
    remedy = f"write node 0's numeric address in the spec, or correct {address} in /etc/hosts or DNS there"
    if not route.resolved:
        return failure(f"does not know the name {address}", remedy)
    first = route.resolved[0]
    if _is_in(first, _LOOPBACK) and not _is_in(address, _LOOPBACK):
        what = f"{address} is {first} there"
        if node.number > 0:
            return failure(f"{what}: itself, not node 0", remedy)
        return warning(f"{what}: its own rank 0 may give it to others as its address", remedy)

    def resolved(other: Node) -> str | None:
        there = _route(fleet, other)
        if there is None or not there.resolved or _is_in(there.resolved[0], _LOOPBACK):
            return None
        return there.resolved[0]

    if others := fleet.majority_against(node, resolved):
        return warning(f"{address} is {first} there, and {resolved(others[0])} on {names(others)}", remedy)
    return ok(f"{address} is {first}" if first != address else address)


def interface(fleet: Fleet, node: Node) -> Result | None:
    """Rows 1 and 2: NCCL and Gloo use an interface that does not exist, or does not lead to the other hosts."""
    if fleet.cluster.nodes == 1:
        return None
    wanted, facts = node.host.socket_interface, node.facts
    route = _route(fleet, node)
    leads = route.interface if route is not None and route.interface != "lo" else ""
    if wanted is None:
        if route is None:
            return node.not_reported("routes")
        if node.number > 0 and not route.interface:
            return failure(f"no way to {fleet.master_address}", "see `ip route` there; the hosts need a common network")
        return _rate_of(fleet, node, leads) or ok(f"{leads} leads to node 0" if leads else "is node 0")
    if facts.interfaces is None:
        return node.not_reported("interfaces")
    own = next((one for one in facts.interfaces if one.name == wanted), None)
    remedy = f"correct socket_interface in the spec{f', {leads} leads to node 0' if leads else ''}"
    if own is None:
        others = named((one.name for one in facts.interfaces if one.name != "lo"), 6)
        return failure(f"no interface {wanted}, but {others or 'no other'}", remedy)
    if not own.is_up or not own.addresses:
        return failure(f"{wanted} {'has no address' if own.is_up else 'is down'}", f"bring it up, or {remedy}")
    if leads and leads != wanted:
        return warning(f"socket_interface is {wanted}, and {leads} leads to node 0", remedy)
    return _rate_of(fleet, node, wanted) or ok(wanted)


def _rate_of(fleet: Fleet, node: Node, name: str) -> Result | None:
    """Return a warning if plain sockets are the network and the interface is slower than in the spec."""
    own = next((one for one in node.facts.interfaces or () if one.name == name), None)
    wanted = fleet.cluster.nic_bytes_per_s
    if fleet.cluster.fabric.kind != "ethernet" or own is None or own.speed_bytes_per_s is None:
        return None
    if own.speed_bytes_per_s >= _FULL_RATE * wanted:
        return None
    return warning(
        f"{name} runs at {format_bit_rate(own.speed_bytes_per_s)}, and the spec has {format_bit_rate(wanted)}",
        "see the cable and the switch, or correct ib_bandwidth in the spec",
    )


def address(fleet: Fleet, node: Node) -> Result | None:
    """Row 3: the address that peers are given is that of Docker's bridge, which is the same on every host."""
    if fleet.cluster.nodes == 1:
        return None
    if node.facts.interfaces is None:
        return node.not_reported("interfaces")
    route = _route(fleet, node)
    source = route.source if route is not None else ""
    if node.facts.in_container and _is_in(source, _DOCKER):
        return failure(
            f"is in a container behind Docker's bridge ({source}), which no other machine reaches",
            "start the container with --network host",
        )
    for one in _candidates(node):
        for other in fleet.others(node):
            common = {
                address for each in _candidates(other) for address in each.addresses if _is_global(address)
            } & set(one.addresses)
            if not common:
                continue
            what = f"{one.name} has the address {named(sorted(common))}, and so has {other.name}"
            if source in common or node.host.socket_interface:
                return failure(what, "give each host an address of its own")
            return warning(
                f"{what}: NCCL may take it", "name the right one with socket_interface under hosts in the spec"
            )
    return ok(source or "addresses of its own")


def mtu(fleet: Fleet, node: Node) -> Result | None:
    """Row 18: another frame size than on the other hosts: small messages pass, large ones hang."""
    if fleet.cluster.nodes == 1:
        return None
    if node.facts.interfaces is None and node.facts.adapters is None:
        return node.not_reported("interfaces")

    def of_interface(one: Node) -> int | None:
        name = _socket_interface(fleet, one)
        return next((each.mtu_bytes for each in one.facts.interfaces or () if each.name == name), None)

    def of_adapters(one: Node) -> int | None:
        if not fleet.uses_rdma:
            return None
        return most_common(each.active_mtu_bytes for each in active_adapters(one))

    for what, value in ((_socket_interface(fleet, node), of_interface), ("RDMA adapters", of_adapters)):
        if words := fleet.difference(node, value):
            return warning(
                f"MTU of {what} is {words}",
                "set the same MTU on all hosts and switches; try `ping -M do -s 8972` between them where it is 9000",
            )
    found = of_interface(node) or of_adapters(node)
    return ok(f"MTU {found}") if found else skipped("the MTU is not known")


def master_port(fleet: Fleet, node: Node) -> Result | None:
    """Row 6: the rendezvous port is already in use."""
    if fleet.needs is None or node.number != 0:
        return None
    port, ports = fleet.needs.master_port, node.facts.listening_ports
    if ports is None:
        return node.not_reported("listening_ports")
    if port in ports:
        return failure(
            f"port {port} is taken",
            f"see `ss -ltnp sport = :{port}` there: perhaps {fleet.earlier_run(node)}",
        )
    low, high = node.facts.port_range or (0, -1)
    if low <= port <= high:
        return warning(
            f"port {port} is among those for outgoing connections ({low} to {high}), one of which may take it",
            f"reserve it: `sysctl net.ipv4.ip_local_reserved_ports={port}`, as root",
        )
    return ok(f"port {port} is free")


def port_range(fleet: Fleet, node: Node) -> Result | None:
    """Row 7: NCCL and Gloo listen on ports of this range, and each must be open between all hosts."""
    if fleet.cluster.nodes == 1:
        return None
    if node.facts.port_range is None:
        return node.not_reported("port_range")
    low, high = node.facts.port_range
    if high - low + 1 < _FEW_PORTS:
        return warning(f"{max(0, high - low + 1)} ports, {low} to {high}", "widen net.ipv4.ip_local_port_range")
    return ok(f"{low} to {high}")


def fabric_address(fleet: Fleet, node: Node) -> str:
    """Return the address at which the other hosts reach a node.

    That is one of the spec's interface, else the one from which it reaches node 0, else the spec's.
    """
    route = _route(fleet, node)
    own = next((one for one in node.facts.interfaces or () if one.name == node.host.socket_interface), None)
    numeric = next((address for address in own.addresses if _is_global(address)), "") if own is not None else ""
    source = route.source if route is not None and _is_global(route.source) else ""
    return numeric or source or node.host.address.strip("[]")


def _route(fleet: Fleet, node: Node) -> RouteFacts | None:
    return next((route for route in node.facts.routes if route.address == fleet.master_address), None)


def _socket_interface(fleet: Fleet, node: Node) -> str:
    """Return the interface of the spec, else the one that leads to node 0; on node 0, the one with its address."""
    if node.host.socket_interface:
        return node.host.socket_interface
    route = _route(fleet, node)
    if route is None:
        return node.facts.default_interface
    if route.interface and route.interface != "lo":
        return route.interface
    holds = (one.name for one in node.facts.interfaces or () if route.source in one.addresses and one.name != "lo")
    return next(holds, node.facts.default_interface)


def _candidates(node: Node) -> Iterator[InterfaceFacts]:
    """Yield the interfaces that NCCL may use: the spec's, or all that are up except lo and docker (NCCL user guide)."""
    for one in node.facts.interfaces or ():
        if node.host.socket_interface:
            if one.name == node.host.socket_interface:
                yield one
        elif one.is_up and one.name != "lo" and not one.name.startswith("docker"):
            yield one


def _is_in(text: str, network: ipaddress.IPv4Network) -> bool:
    found = address_of(text)
    return found is not None and found in network


def _is_global(text: str) -> bool:
    """Whether other machines may use an address: it is neither loopback nor link-local."""
    found = address_of(text)
    return found is not None and not (found.is_loopback or found.is_link_local or found.is_unspecified)
