"""Checks of names, interfaces, ports and RDMA adapters, as far as one host can say; `network` tries the connections."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from topoplan.catalog.fabrics import link_layers, profile_of
from topoplan.hosts.facts import AdapterFacts, HostFacts, InterfaceFacts, RouteFacts
from topoplan.hosts.scene import Found, Node, Scene, failure, most_common, names, ok, skipped, version, warning
from topoplan.hosts.sections import number
from topoplan.units import format_bit_rate, named

_DOCKER = ipaddress.IPv4Network("172.17.0.0/16")
_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
_FULL_RATE = 0.95
"""Of the rate in the spec: what is below has trained to fewer lanes or a slower speed."""
_FEW_PORTS = 1000
"""A rank listens on some ports, and has a connection to each peer of its groups."""
_DMABUF_KERNEL = (5, 12)
"""Linux can export GPU memory since (NCCL user guide, GPUDirect RDMA); no nvidia_peermem is needed then."""
_DYNAMIC_GID_NCCL = (2, 21)
"""NCCL picks the GID itself since (NCCL user guide, NCCL_IB_GID_INDEX)."""
_ROCE_V2 = "RoCE v2"

_DEBUG_SETTINGS = {
    "NCCL_P2P_DISABLE": "GPUs of a node talk through host memory",
    "NCCL_SHM_DISABLE": "ranks of a node talk over the network",
    "NCCL_IB_DISABLE": "no RDMA",
    "NCCL_ALGO": "its choice of algorithm is taken away",
    "NCCL_PROTO": "its choice of protocol is taken away; LL128 can corrupt data",
    "NCCL_P2P_LEVEL": "decides where GPUs talk directly",
    "NCCL_NET_GDR_LEVEL": "decides where GPUDirect RDMA is used",
    "NCCL_BUFFSIZE": "changes the size of its buffers",
    "NCCL_NTHREADS": "changes its kernels",
    "NCCL_MIN_NCHANNELS": "changes its kernels",
    "NCCL_MAX_NCHANNELS": "changes its kernels",
    "NCCL_CUMEM_ENABLE": "takes away multi-node NVLink where 0",
    "NCCL_LAUNCH_MODE": "changes how its kernels start",
}
"""Of the debugging section of NCCL's user guide: "should not be used in production". With what each does."""
_UNLESS_SET = {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_IB_DISABLE": "0", "NCCL_CUMEM_ENABLE": "1"}
"""Values that change nothing."""


def master_name(scene: Scene, node: Node) -> Found | None:
    """Row 5: the name of node 0 is unknown, or means the host itself (Debian's 127.0.1.1), or another machine."""
    if scene.cluster.nodes == 1:
        return None
    address = scene.master_address
    route = _route(scene, node)
    if route is None:
        return node.silent("routes")
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
        there = _route(scene, other)
        if there is None or not there.resolved or _is_in(there.resolved[0], _LOOPBACK):
            return None
        return there.resolved[0]

    if others := scene.unlike(node, resolved):
        return warning(f"{address} is {first} there, and {resolved(others[0])} on {names(others)}", remedy)
    return ok(f"{address} is {first}" if first != address else address)


def interface(scene: Scene, node: Node) -> Found | None:
    """Rows 1 and 2: NCCL and Gloo take an interface that is not there, or not the one that leads to the others."""
    if scene.cluster.nodes == 1:
        return None
    wanted, facts = node.host.socket_interface, node.facts
    route = _route(scene, node)
    leads = route.interface if route is not None and route.interface != "lo" else ""
    if wanted is None:
        if route is None:
            return node.silent("routes")
        if node.number > 0 and not route.interface:
            return failure(f"no way to {scene.master_address}", "see `ip route` there; the hosts need a common network")
        return _rate_of(scene, node, leads) or ok(f"{leads} leads to node 0" if leads else "is node 0")
    if facts.interfaces is None:
        return node.silent("interfaces")
    own = next((one for one in facts.interfaces if one.name == wanted), None)
    remedy = f"correct socket_interface in the spec{f', {leads} leads to node 0' if leads else ''}"
    if own is None:
        others = named((one.name for one in facts.interfaces if one.name != "lo"), 6)
        return failure(f"no interface {wanted}, but {others or 'no other'}", remedy)
    if not own.is_up or not own.addresses:
        return failure(f"{wanted} {'has no address' if own.is_up else 'is down'}", f"bring it up, or {remedy}")
    if leads and leads != wanted:
        return warning(f"socket_interface is {wanted}, and {leads} leads to node 0", remedy)
    return _rate_of(scene, node, wanted) or ok(wanted)


def _rate_of(scene: Scene, node: Node, name: str) -> Found | None:
    """Where plain sockets are the network, an interface that is slower than the spec says."""
    own = next((one for one in node.facts.interfaces or () if one.name == name), None)
    wanted = scene.cluster.nic_bytes_per_s
    if scene.cluster.fabric.kind != "ethernet" or own is None or own.speed_bytes_per_s is None:
        return None
    if own.speed_bytes_per_s >= _FULL_RATE * wanted:
        return None
    return warning(
        f"{name} runs at {format_bit_rate(own.speed_bytes_per_s)}, and the spec has {format_bit_rate(wanted)}",
        "see the cable and the switch, or correct ib_bandwidth in the spec",
    )


def address(scene: Scene, node: Node) -> Found | None:
    """Row 3: the address that the others are told is that of Docker's bridge, which each host has."""
    if scene.cluster.nodes == 1:
        return None
    if node.facts.interfaces is None:
        return node.silent("interfaces")
    route = _route(scene, node)
    source = route.source if route is not None else ""
    if node.facts.in_container and _is_in(source, _DOCKER):
        return failure(
            f"is in a container behind Docker's bridge ({source}), which no other machine reaches",
            "start the container with --network host",
        )
    for one in _candidates(node):
        for other in scene.others(node):
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


def mtu(scene: Scene, node: Node) -> Found | None:
    """Row 18: frames of another size than on the other hosts: small messages pass, large ones hang."""
    if scene.cluster.nodes == 1:
        return None
    if node.facts.interfaces is None and node.facts.adapters is None:
        return node.silent("interfaces")

    def of_interface(one: Node) -> int | None:
        name = _socket_interface(scene, one)
        return next((each.mtu_bytes for each in one.facts.interfaces or () if each.name == name), None)

    def of_adapters(one: Node) -> int | None:
        if not scene.uses_rdma:
            return None
        return most_common(each.active_mtu_bytes for each in _active(one))

    for what, value in ((_socket_interface(scene, node), of_interface), ("RDMA adapters", of_adapters)):
        if others := scene.unlike(node, value):
            return warning(
                f"MTU of {what} is {value(node)}, and {value(others[0])} on {names(others)}",
                "set the same MTU on all hosts and switches; try `ping -M do -s 8972` between them where it is 9000",
            )
    found = of_interface(node) or of_adapters(node)
    return ok(f"MTU {found}") if found else skipped("the MTU is not known")


def master_port(scene: Scene, node: Node) -> Found | None:
    """Row 6: something listens on the port of the rendezvous already."""
    if scene.needs is None or node.number != 0:
        return None
    port, ports = scene.needs.master_port, node.facts.listening_ports
    if ports is None:
        return node.silent("listening_ports")
    if port in ports:
        return failure(
            f"port {port} is taken",
            f"see `ss -ltnp sport = :{port}` there: perhaps an earlier run, which `topoplan stop` ends",
        )
    low, high = node.facts.port_range or (0, -1)
    if low <= port <= high:
        return warning(
            f"port {port} is among those for outgoing connections ({low} to {high}), one of which may take it",
            f"reserve it: `sysctl net.ipv4.ip_local_reserved_ports={port}`, as root",
        )
    return ok(f"port {port} is free")


def port_range(scene: Scene, node: Node) -> Found | None:
    """Row 7: NCCL and Gloo listen on ports of this range, and each must be open between all hosts."""
    if scene.cluster.nodes == 1:
        return None
    if node.facts.port_range is None:
        return node.silent("port_range")
    low, high = node.facts.port_range
    if high - low + 1 < _FEW_PORTS:
        return warning(f"{max(0, high - low + 1)} ports, {low} to {high}", "widen net.ipv4.ip_local_port_range")
    return ok(f"{low} to {high}")


def adapters(scene: Scene, node: Node) -> Found | None:
    """Row 16: RDMA adapters that are down, missing or slow: NCCL says nothing and takes the others, or sockets."""
    if not scene.uses_rdma:
        return None
    if node.facts.adapters is None:
        return node.silent("adapters")
    cluster = scene.cluster
    chosen, active = list(_chosen(node)), _active(node)
    if absent := [name for name in node.host.hcas if not any(_is_named(one, name) for one in node.facts.adapters)]:
        return failure(f"no adapter {named(absent, 8)}", "correct hcas in the spec; `ibv_devices` lists those there")
    down = [f"{one.device}:{one.port} is {one.state}" for one in chosen if one.state != "ACTIVE"]
    see = "see `ibstat`, cables and switch ports"
    if not active:
        what = f"no RDMA adapter is up ({named(down)})" if down else "no RDMA adapter"
        return failure(f"{what}: NCCL would take sockets", f"{see}; or write fabric: {{kind: ethernet}} in the spec")
    wanted = len(node.host.hcas) or cluster.nics_per_node
    if len(active) < wanted:
        which = f" ({named(down, 8)})" if down else ""
        return warning(f"{len(active)} of {wanted} RDMA adapters are up{which}", see)
    slow = [
        one for one in active if one.rate_bytes_per_s and one.rate_bytes_per_s < _FULL_RATE * cluster.nic_bytes_per_s
    ]
    if len(active) - len(slow) < wanted:
        rates = named((f"{one.device} {format_bit_rate(one.rate_bytes_per_s or 0)}" for one in slow), 8)
        return warning(f"slower than the {format_bit_rate(cluster.nic_bytes_per_s)} of the spec: {rates}", see)
    other = [one for one in active if one.link_layer not in link_layers(cluster.fabric.kind)]
    if len(active) - len(other) < wanted:
        devices = named((one.device for one in other), 8)
        return warning(
            f"link layer {other[0].link_layer} on {devices}, and the fabric of the spec is {cluster.fabric.kind}",
            "correct fabric in the spec",
        )
    return ok(f"{len(active)} up: {named(one.device for one in active)}")


def gid(scene: Scene, node: Node) -> Found | None:
    """Row 17: RoCE without a routable address (RoCE v2, IPv4), or with a fixed index that is another one here."""
    if not scene.uses_rdma or node.facts.adapters is None:
        return None
    ports = [one for one in _active(node) if one.link_layer.lower() == "ethernet"]
    if not ports:
        return None
    fixed = scene.cluster.env.get("NCCL_IB_GID_INDEX", node.facts.nccl_settings.get("NCCL_IB_GID_INDEX", "-1")).strip()
    routable = {f"{one.device}:{one.port}": _routable(one) for one in ports}
    if lacking := [name for name, indices in routable.items() if not indices]:
        if not any(one.gids for one in ports):
            return skipped("the host does not say which GIDs its adapters have")
        return failure(
            f"no RoCE v2 GID with an IPv4 address on {named(lacking, 8)}", "give the adapters' interfaces addresses"
        )
    if fixed.isdecimal():
        if wrong := [name for name, indices in routable.items() if int(fixed) not in indices]:
            which = next(iter(routable[wrong[0]]))
            return failure(
                f"NCCL_IB_GID_INDEX={fixed} is no RoCE v2 GID with an IPv4 address on {named(wrong, 8)}, where it is"
                f" {which}",
                "leave NCCL_IB_GID_INDEX out: NCCL 2.21 and later find the GID",
            )
        return ok(f"NCCL_IB_GID_INDEX={fixed} is RoCE v2")
    nccl = node.facts.versions.get("nccl", "")
    if version(nccl) and version(nccl)[:2] < _DYNAMIC_GID_NCCL:
        indices = sorted({next(iter(found)) for found in routable.values()})
        return warning(
            f"NCCL {nccl} does not look for the GID itself; it is {named(map(str, indices))} here",
            "use NCCL 2.21 or later; or set NCCL_IB_GID_INDEX under env in the spec where it is the same on all hosts",
        )
    return ok("RoCE v2 with an IPv4 address")


def traffic_class(scene: Scene, node: Node) -> Found | None:
    """RoCE in another queue than the one that drops nothing. What an administrator has set for a port
    (tc/PORT/traffic_class) takes the place of what NCCL asks for, in queue pairs that the kernel sets up (nccl#2383).
    """
    if scene.cluster.nodes == 1 or scene.cluster.fabric.kind != "roce" or node.facts.adapters is None:
        return None
    settings = {**node.facts.nccl_settings, **scene.cluster.env}
    asked = scene.cluster.fabric.traffic_class
    if "NCCL_IB_TC" in settings:
        asked = number(settings["NCCL_IB_TC"])
    forced = {one.traffic_class for one in _active(node)}
    if len(forced) > 1:
        named_ones = ", ".join(f"{one.device} {one.traffic_class or 'none'}" for one in _active(node))
        return warning(f"its adapters send with traffic classes of their own: {named_ones}", "set one for all of them")
    own = next(iter(forced), None)
    if others := scene.unlike(node, _forced):
        return warning(
            f"the host sends with traffic class {own}, and {_forced(others[0])} on {names(others)}", "set it alike"
        )
    if own is not None and asked not in (None, own):
        return warning(
            f"traffic class {asked} is asked for, and the host sends with {own} (DSCP {own >> 2}) whatever is asked",
            f"write traffic_class: {own} under fabric in the spec, or correct tc/PORT/traffic_class there",
        )
    if own is not None or asked is not None:
        used = own if own is not None else asked or 0
        return ok(f"traffic class {used} (DSCP {used >> 2})")
    return skipped(
        "neither spec nor host names a traffic class: where PFC follows DSCP, NCCL's 0 is a queue that drops packets;"
        " ask who runs the network"
    )


def _forced(node: Node) -> int | None:
    return next((one.traffic_class for one in _active(node)), None)


def peermem(scene: Scene, node: Node) -> Found | None:
    """Row 19: without GPUDirect RDMA all traffic between nodes goes through host memory."""
    if scene.cluster.nodes == 1 or not scene.cluster.fabric.uses_verbs:
        return None  # the driver of EFA has a module of its own for it
    if node.facts.peermem:
        return ok("nvidia_peermem is loaded")
    if version(node.facts.kernel) >= _DMABUF_KERNEL:
        return ok(f"dma-buf of Linux {node.facts.kernel}")
    if node.facts.peermem is None:
        return node.silent("peermem")
    kernel = f", and Linux {node.facts.kernel} has no dma-buf for it" if node.facts.kernel else ""
    return warning(f"nvidia_peermem is not loaded{kernel}: no GPUDirect RDMA", "`modprobe nvidia-peermem`, as root")


def nccl_settings(scene: Scene, node: Node) -> Found:
    """Settings of the session and of NCCL's files that take its good defaults away, or that hosts differ in."""
    own = {name: value for name, value in node.facts.nccl_settings.items() if name not in scene.cluster.env}
    vendors = profile_of(own)
    wrong = [
        f"{name}={value} ({_DEBUG_SETTINGS[name]})"
        for name, value in sorted(own.items())
        if name in _DEBUG_SETTINGS.keys() - vendors
        and value.strip() != _UNLESS_SET.get(name)
        and not _is_planned(scene, name)
    ]
    if wrong:
        return warning(
            named(wrong), "remove it from the session's environment, /etc/nccl.conf and ~/.nccl.conf, or say why in env"
        )
    for name in sorted({name for other in scene.nodes for name in other.facts.nccl_settings} - set(scene.cluster.env)):
        if others := scene.unlike(node, lambda one, name=name: _setting(one.facts, name)):  # type: ignore[misc]
            if name.endswith("_IFNAME") or name == "NCCL_IB_HCA":
                continue  # names of devices, which may differ
            there = _setting(others[0].facts, name)
            return warning(
                f"{name} is {_setting(node.facts, name)}, and {there} on {names(others)}", "set it alike, or nowhere"
            )
    shown = [f"{name}={value}" for name, value in sorted(own.items())]
    return ok(named(shown, 6) if shown else "NCCL's defaults")


def fabric_address(scene: Scene, node: Node) -> str:
    """The address by which the others reach it: the one from which it reaches node 0, else that of the spec."""
    route = _route(scene, node)
    own = next((one for one in node.facts.interfaces or () if one.name == node.host.socket_interface), None)
    numeric = next((address for address in own.addresses if _is_global(address)), "") if own is not None else ""
    source = route.source if route is not None and _is_global(route.source) else ""
    return numeric or source or node.host.address.strip("[]")


def _setting(facts: HostFacts, name: str) -> str | None:
    return facts.nccl_settings.get(name, "not set")


def _is_planned(scene: Scene, name: str) -> bool:
    return name == "NCCL_IB_DISABLE" and not scene.uses_rdma


def _route(scene: Scene, node: Node) -> RouteFacts | None:
    return next((route for route in node.facts.routes if route.address == scene.master_address), None)


def _socket_interface(scene: Scene, node: Node) -> str:
    """The interface of its sockets, as the spec says or as it leads to node 0; of node 0, the one with its address."""
    if node.host.socket_interface:
        return node.host.socket_interface
    route = _route(scene, node)
    if route is None:
        return node.facts.default_interface
    if route.interface and route.interface != "lo":
        return route.interface
    holds = (one.name for one in node.facts.interfaces or () if route.source in one.addresses and one.name != "lo")
    return next(holds, node.facts.default_interface)


def _candidates(node: Node) -> Iterator[InterfaceFacts]:
    """Interfaces that NCCL may take: the one of the spec, else all that are up but lo and docker (NCCL user guide)."""
    for one in node.facts.interfaces or ():
        if node.host.socket_interface:
            if one.name == node.host.socket_interface:
                yield one
        elif one.is_up and one.name != "lo" and not one.name.startswith("docker"):
            yield one


def _chosen(node: Node) -> Iterator[AdapterFacts]:
    """The adapters of the spec, else all."""
    for one in node.facts.adapters or ():
        if not node.host.hcas or any(_is_named(one, name) for name in node.host.hcas):
            yield one


def _active(node: Node) -> list[AdapterFacts]:
    return [one for one in _chosen(node) if one.state == "ACTIVE"]


def _is_named(one: AdapterFacts, name: str) -> bool:
    device, _, port = name.removeprefix("=").partition(":")
    return one.device == device and (not port or str(one.port) == port)


def _routable(one: AdapterFacts) -> Mapping[int, str]:
    """Index -> GID of type RoCE v2 that stands for an IPv4 address (::ffff:a.b.c.d)."""
    return {
        index: text
        for index, (text, kind) in sorted(one.gids.items())
        if kind.lower() == _ROCE_V2.lower() and _is_mapped(text)
    }


def _is_mapped(text: str) -> bool:
    try:
        return ipaddress.IPv6Address(text).ipv4_mapped is not None
    except ValueError:
        return False


def _is_in(text: str, network: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.ip_address(text) in network
    except ValueError:
        return False


def _is_global(text: str) -> bool:
    """An address that other machines may use: neither loopback nor link-local."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)
