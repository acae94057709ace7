"""Checks of RDMA adapters: up, fast, with addresses, and with a path to the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.catalog.fabrics import link_layers
from topoplan.hosts.facts import AdapterFacts
from topoplan.hosts.preflight.fleet import Fleet, Node, version
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.hosts.sections import address_of, number
from topoplan.units import format_bit_rate, named

_FULL_RATE = 0.95
"""Fraction of the rate in the spec; a lower rate means that the link trained to fewer lanes or a slower speed."""
_DMABUF_KERNEL = (5, 12)
"""First Linux version that can export GPU memory (NCCL user guide, GPUDirect RDMA), without nvidia_peermem."""
_DYNAMIC_GID_NCCL = (2, 21)
"""First NCCL version that selects the GID itself (NCCL user guide, NCCL_IB_GID_INDEX)."""
_ROCE_V2 = "RoCE v2"


def adapters(fleet: Fleet, node: Node) -> Result | None:
    """Row 16: RDMA adapters that are down, missing or slow; NCCL silently uses the others, or sockets."""
    if not fleet.uses_rdma:
        return None
    if node.facts.adapters is None:
        return node.not_reported("adapters")
    cluster = fleet.cluster
    chosen, active = list(_chosen(node)), active_adapters(node)
    if absent := [name for name in node.host.hcas if not any(_is_named(one, name) for one in node.facts.adapters)]:
        return failure(f"no adapter {named(absent, 8)}", "correct hcas in the spec; `ibv_devices` lists those there")
    down = [f"{one.device}:{one.port} is {one.state}" for one in chosen if one.state != "ACTIVE"]
    see = "see `ibstat`, cables and switch ports"
    if not active:
        what = f"no RDMA adapter is up ({named(down)})" if down else "no RDMA adapter"
        return failure(
            f"{what}: NCCL would fall back to sockets", f"{see}; or write fabric: {{kind: ethernet}} in the spec"
        )
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


def gid(fleet: Fleet, node: Node) -> Result | None:
    """Row 17: RoCE without a routable address (RoCE v2, IPv4), or with a fixed index that means another one here."""
    if not fleet.uses_rdma or node.facts.adapters is None:
        return None
    ports = [one for one in active_adapters(node) if one.link_layer.lower() == "ethernet"]
    if not ports:
        return None
    fixed = fleet.cluster.env.get("NCCL_IB_GID_INDEX", node.facts.nccl_settings.get("NCCL_IB_GID_INDEX", "-1")).strip()
    routable = {f"{one.device}:{one.port}": _routable(one) for one in ports}
    if lacking := [name for name, indices in routable.items() if not indices]:
        if not any(one.gids for one in ports):
            return skipped("the host does not report which GIDs its adapters have")
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


def traffic_class(fleet: Fleet, node: Node) -> Result | None:
    """RoCE in another queue than the lossless one.

    What is set for a port (tc/PORT/traffic_class) overrides what NCCL requests, in queue pairs of the kernel
    (nccl#2383).
    """
    if fleet.cluster.nodes == 1 or fleet.cluster.fabric.kind != "roce" or node.facts.adapters is None:
        return None
    settings = {**node.facts.nccl_settings, **fleet.cluster.env}
    asked = fleet.cluster.fabric.traffic_class
    if "NCCL_IB_TC" in settings:
        asked = number(settings["NCCL_IB_TC"])
    forced = {one.traffic_class for one in active_adapters(node)}
    if len(forced) > 1:
        named_ones = ", ".join(f"{one.device} {one.traffic_class or 'none'}" for one in active_adapters(node))
        return warning(f"its adapters send with traffic classes of their own: {named_ones}", "set one for all of them")
    own = next(iter(forced), None)
    if words := fleet.difference(node, _forced):
        return warning(f"the host sends with traffic class {words}", "set the same on all hosts")
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
    return next((one.traffic_class for one in active_adapters(node)), None)


def peermem(fleet: Fleet, node: Node) -> Result | None:
    """Row 19: without GPUDirect RDMA all traffic between nodes goes through host memory."""
    if fleet.cluster.nodes == 1 or not fleet.cluster.fabric.uses_verbs:
        return None  # EFA's driver has a module of its own for this
    if node.facts.peermem:
        return ok("nvidia_peermem is loaded")
    if version(node.facts.kernel) >= _DMABUF_KERNEL:
        return ok(f"dma-buf of Linux {node.facts.kernel}")
    if node.facts.peermem is None:
        return node.not_reported("peermem")
    kernel = f", and Linux {node.facts.kernel} has no dma-buf for it" if node.facts.kernel else ""
    return warning(f"nvidia_peermem is not loaded{kernel}: no GPUDirect RDMA", "`modprobe nvidia-peermem`, as root")


def _chosen(node: Node) -> Iterator[AdapterFacts]:
    for one in node.facts.adapters or ():
        if not node.host.hcas or any(_is_named(one, name) for name in node.host.hcas):
            yield one


def active_adapters(node: Node) -> list[AdapterFacts]:
    """Return the adapters that are up, of those named in the spec or else of all."""
    return [one for one in _chosen(node) if one.state == "ACTIVE"]


def _is_named(one: AdapterFacts, name: str) -> bool:
    device, _, port = name.removeprefix("=").partition(":")
    return one.device == device and (not port or str(one.port) == port)


def _routable(one: AdapterFacts) -> Mapping[int, str]:
    """Return index -> GID of the RoCE v2 GIDs that represent an IPv4 address (::ffff:a.b.c.d)."""
    return {
        index: text
        for index, (text, kind) in sorted(one.gids.items())
        if kind.lower() == _ROCE_V2.lower() and getattr(address_of(text), "ipv4_mapped", None) is not None
    }
