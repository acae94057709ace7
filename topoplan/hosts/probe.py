"""Probe hosts: each is asked about its hardware and software with one login and one script, all hosts concurrently.

What they say together tells which addresses, interfaces and adapters a cluster of them uses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.catalog.fabrics import FabricKind, kind_of_link_layer, machine_of
from topoplan.errors import HostError
from topoplan.hosts.collect import COLLECT, COLLECT_S, CollectRequest, collect_arguments, host_facts
from topoplan.hosts.facts import AdapterFacts, HostFacts, RouteFacts
from topoplan.hosts.sections import address_of
from topoplan.remote.connection import no_shell_error
from topoplan.remote.fanout import logged_in
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.specs.cluster import Fabric, Host

_NEAR = ("PIX", "PXB")
"""Topology between a GPU and an adapter that share PCIe switches, so that data need not cross the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A probed host."""

    name: str
    """The user's name for the host; the key of results and messages."""
    host: Host
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
    the one that SSH connected to. A name that resolves to a loopback address is of no use to the others.
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

    Of a single host, that of the default route. Empty if nothing is known.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeNetwork:
    """The network that carries a host's training traffic."""

    kind: FabricKind
    adapters: tuple[AdapterFacts, ...] = ()
    """The RDMA ports in use; empty for ethernet and tcpxo."""
    nics: int = 1
    """The number of `adapters`; without any, the number of the GPUs' NICs, or 1 for plain sockets."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(device, reason) of all ports that are not used."""
    rate_bytes_per_s: float | None = None
    """Rate of one NIC, each way: that of the slowest one in use."""
    near_gpus: bool = False
    """Whether the adapters share PCIe switches with GPUs; False if unknown, or if they are attached to the CPU."""

    @property
    def hcas(self) -> tuple[str, ...]:
        """The adapters in the form of NCCL_IB_HCA, `mlx5_0:1`; empty if NCCL does not use verbs (AWS's EFA)."""
        if not Fabric(kind=self.kind).uses_verbs:
            return ()
        return tuple(f"{one.device}:{one.port}" for one in self.adapters)


def compute_network(facts: HostFacts, interface: str) -> ComputeNetwork:
    """Return the training network of a host whose sockets use `interface`, as opposed to storage or management.

    These are the active ports that share PCIe switches with a GPU, or all active ports if none does or the driver does
    not tell; of them, the ports with the link layer and rate that account for most of the bandwidth. Without adapters,
    the known network of the cloud's machine type is returned.
    """
    left_out: list[tuple[str, str]] = []
    active: list[AdapterFacts] = []
    for adapter in facts.adapters or ():
        if adapter.state != "ACTIVE":
            left_out.append((adapter.device, f"port {adapter.port} is {adapter.state or 'in an unknown state'}"))
        elif adapter.rate_bytes_per_s is None:
            left_out.append((adapter.device, "its rate is not known"))
        else:
            active.append(adapter)
    near = [adapter for adapter in active if _distance(facts, adapter) in _NEAR]
    if near:
        left_out += [
            (one.device, f"{_distance(facts, one) or 'not near'} to every GPU") for one in active if one not in near
        ]
    chosen = near or active
    if not chosen:
        machine = machine_of(facts.firmware, facts.pci)
        kind: FabricKind = "ethernet"
        speeds = {one.name: one.speed_bytes_per_s for one in facts.interfaces or ()}
        nics, rate_bytes_per_s = 1, speeds.get(interface)
        if machine is not None and machine.nics is not None:
            kind, nics, rate_bytes_per_s = machine.kind or kind, machine.nics, machine.nic_bytes_per_s
        return ComputeNetwork(kind=kind, left_out=tuple(left_out), nics=nics, rate_bytes_per_s=rate_bytes_per_s)
    weights: Counter[tuple[str, float]] = Counter()
    for one in chosen:
        weights[one.link_layer, one.rate_bytes_per_s or 0.0] += round(one.rate_bytes_per_s or 0.0)
    # Ties are resolved by rate, so that the order of devices does not matter.
    layer, rate = max(weights, key=lambda pair: (weights[pair], pair[1], pair[0]))
    same = [one for one in chosen if (one.link_layer, one.rate_bytes_per_s) == (layer, rate)]
    left_out += [(one.device, _unlike(one, layer)) for one in chosen if one not in same]
    return ComputeNetwork(
        kind=kind_of_link_layer(layer) or "roce",
        adapters=tuple(same),
        nics=len(same),
        left_out=tuple(left_out),
        rate_bytes_per_s=rate,
        near_gpus=bool(near),
    )


def _unlike(adapter: AdapterFacts, layer: str) -> str:
    if adapter.link_layer != layer:
        return f"link layer {adapter.link_layer or 'unknown'}"
    return f"{(adapter.rate_bytes_per_s or 0.0) * 8 / 1e9:g} Gb/s"


def _distance(facts: HostFacts, adapter: AdapterFacts) -> str:
    """Return the closest topology from the adapter to any GPU, as the matrix names it; empty if unknown."""
    order = ("PIX", "PXB", "PHB", "NODE", "SYS")
    found = {
        link
        for (device, other), link in (facts.topology or {}).items()
        if device == adapter.device and re.fullmatch(r"GPU\d+", other)
    }
    return next((link for link in order if link in found), "")
