"""Probe hosts: each is asked about its hardware and software with one login and one script, all hosts concurrently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.errors import HostError
from topoplan.hosts.collect import COLLECT, COLLECT_S, CollectRequest, collect_arguments, host_facts
from topoplan.hosts.compute_network import ComputeNetwork, compute_network
from topoplan.hosts.facts import HostFacts, RouteFacts
from topoplan.hosts.sections import address_of
from topoplan.remote.connection import no_shell_error
from topoplan.remote.fanout import logged_in
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.specs.cluster import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A probed host."""

    name: str
    """The user's name for the host; the key of results and messages."""
    host: Host
    """The host as the user gave it."""
    hostname: str
    """Name or address that SSH connected to, which may come from the SSH configuration."""
    user: str
    port: int
    facts: HostFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResults:
    """The results of probing hosts."""

    reached: tuple[Probed, ...]
    failed: Mapping[str, HostError]


def probe_hosts(
    hosts: Sequence[Host],
    targets: Mapping[str, Target],
    access: Access,
) -> ProbeResults:
    """Probe hosts; `targets` are those of `hosts`, in the same order. A failed host does not affect the others."""
    routes = route_addresses(
        [(host.address, target.hostname) for host, target in zip(hosts, targets.values(), strict=True)]
    )
    wanted = {
        name: CollectRequest(
            routes=routes,
            places=(host.workdir,) if host.workdir else (),
            python=f"{host.venv}/bin/python" if host.venv else None,
        )
        for name, host in zip(targets, hosts, strict=True)
    }
    with logged_in(targets, access) as logins:
        answers = logins.ask(
            lambda name, connection: connection.run(COLLECT, *collect_arguments(wanted[name]), deadline_s=COLLECT_S),
            deadline_s=COLLECT_S + 5,
        )
    failed = {}
    reached = []
    for host, (name, target) in zip(hosts, targets.items(), strict=True):
        answer = answers[name]
        if isinstance(answer, HostError):
            failed[name] = answer
            continue
        facts = host_facts(answer.stdout)
        if not facts.hostname:
            failed[name] = no_shell_error(target, answer.stderr)
            continue
        reached.append(
            Probed(name=name, host=host, hostname=target.hostname, user=target.user, port=target.port, facts=facts)
        )
    return ProbeResults(reached=tuple(reached), failed=failed)


def route_addresses(hosts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the addresses to which every host is asked the route, from pairs of the user's and SSH's address."""
    return tuple(dict.fromkeys(word for pair in hosts for word in pair if word))


def usable_address(one: Probed, among: Sequence[Probed]) -> str:
    """Return the name or address by which all hosts find a host; empty if there is none.

    The user's own is preferred, if it means the same on every host, because the SSH configuration knows it; otherwise
    the one that SSH connected to. A name that a host resolves to a loopback address (127.0.1.1 in /etc/hosts) is of no
    use to the others.
    """
    for address in dict.fromkeys((one.host.address, one.hostname)):
        found = [resolved for other in among if (resolved := _resolved(other.facts, address)) is not None]
        if (
            len(found) == len(among)
            and len(set(found)) == 1
            and (len(among) == 1 or not getattr(address_of(found[0]), "is_loopback", False))
        ):
            return address
    return ""


def socket_interface(one: Probed, among: Sequence[Probed]) -> tuple[str, tuple[str, ...]]:
    """Return the interface of `one` that leads to the other hosts, and all such interfaces if there are several.

    A single host gives the interface of its default route. Empty if nothing is known.
    """
    names = [
        route.interface
        for other in among
        if other is not one and (route := _route(one.facts, other)) is not None and route.interface not in ("", "lo")
    ]
    found = tuple(dict.fromkeys(names))
    if found:
        return found[0], found
    return (one.facts.default_interface, ()) if len(among) == 1 else ("", ())


def network_of(one: Probed, among: Sequence[Probed]) -> ComputeNetwork:
    """Return the training network of a host."""
    return compute_network(one.facts, socket_interface(one, among)[0])


def _route(facts: HostFacts, other: Probed) -> RouteFacts | None:
    routes = {route.address: route for route in facts.routes}
    found = [routes[address] for address in (other.host.address, other.hostname) if address in routes]
    return next((route for route in found if route.interface), None)


def _resolved(facts: HostFacts, address: str) -> str | None:
    route = next((route for route in facts.routes if route.address == address), None)
    return route.resolved[0] if route is not None and route.resolved else None
