"""Which adapters of a machine its GPUs use for training, as opposed to storage or management."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from topoplan.catalog.fabrics import FabricKind, kind_of_link_layer, machine_of
from topoplan.hosts.facts import AdapterFacts, HostFacts
from topoplan.specs.cluster import Fabric

_NEAR = ("PIX", "PXB")
"""Topology between a GPU and an adapter that share PCIe switches, so that data need not cross the CPU."""


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
    """Return the network of a host whose sockets use `interface`.

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
        if machine is not None and machine.nics is not None:
            return ComputeNetwork(
                kind=machine.kind or "ethernet",
                left_out=tuple(left_out),
                nics=machine.nics,
                rate_bytes_per_s=machine.nic_bytes_per_s,
            )
        speeds = {one.name: one.speed_bytes_per_s for one in facts.interfaces or ()}
        return ComputeNetwork(kind="ethernet", left_out=tuple(left_out), rate_bytes_per_s=speeds.get(interface))
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
