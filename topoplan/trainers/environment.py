"""The trainer's environment on one node: each variable with the reason that the script states next to it.

NCCL's defaults are right for almost everything. NVIDIA lists variables that are for debugging only and "should not be
used in production nor retained in scripts" (NCCL user guide, Environment Variables); of these, only NCCL_IB_DISABLE=1
is set here, for a fabric without RDMA. A vendor's profile that a script reads first (GPUDirect-TCPXO's) may set more.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from topoplan.errors import SpecError
from topoplan.specs.cluster import Cluster, Fabric, Host

_MOST_HCAS = 32  # NCCL user guide, NCCL_IB_HCA
_THREADS_WHEN_UNKNOWN = 4


SOCKET_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables with the network interface of a host, which both choose themselves without."""
DRIVER_FOR_RTX_40 = "550.40.07"
"""With an older one and several RTX 40 cards, accelerate 1.15 refuses to start (utils/environment.py,
check_cuda_p2p_ib_support) unless NCCL_P2P_DISABLE and NCCL_IB_DISABLE are set, to whatever value (state.py,
PartialState). With a newer one the cards reach each other, so no script sets NCCL_P2P_DISABLE."""


class EnvVar(NamedTuple):
    """One exported variable."""

    name: str
    value: str
    reason: str


def node_environment(cluster: Cluster, trainer: tuple[EnvVar, ...], node: int) -> tuple[EnvVar, ...]:
    """Return what node number `node` exports before it starts the trainer, including the trainer's own variables.

    The spec's `env` comes last and overrides the others.
    """
    chosen = {variable.name: variable for variable in (*trainer, *_processes(cluster), *_network(cluster, node))}
    for name, value in cluster.env.items():
        chosen.pop(name, None)
        chosen[name] = EnvVar(name, value, "from env in the cluster spec")
    return tuple(chosen.values())


def asks_for_driver(card: str, cluster: Cluster) -> bool:
    """Whether accelerate refuses several of these cards in a node with a driver older than DRIVER_FOR_RTX_40; `card` is
    a name of the driver's or of a spec."""
    return cluster.gpus_per_node > 1 and re.search("rtx ?40", card, re.IGNORECASE) is not None


def lacking_for_older_driver(cluster: Cluster, node: int, found: Container[str] = ()) -> dict[str, str]:
    """Return the variables, with a value, with which accelerate accepts an older driver and that node number `node`
    neither exports nor has (`found`)."""
    rdma = cluster.nodes > 1 and cluster.fabric.uses_rdma
    exported = {variable.name for variable in node_environment(cluster, (), node)}
    values = {"NCCL_IB_DISABLE": "0" if rdma else "1", "NCCL_P2P_DISABLE": "1"}
    return {name: value for name, value in values.items() if name not in exported and name not in found}


def _processes(cluster: Cluster) -> Iterator[EnvVar]:
    if cluster.cpu_cores is None:
        threads, reason = _THREADS_WHEN_UNKNOWN, "torchrun would set 1; the cluster spec has no cpu_cores"
    else:
        threads = max(1, cluster.cpu_cores // cluster.gpus_per_node)
        reason = f"{cluster.cpu_cores} CPU cores / {cluster.gpus_per_node} GPUs; torchrun would set 1"
    yield EnvVar("OMP_NUM_THREADS", str(threads), reason)
    yield EnvVar("TOKENIZERS_PARALLELISM", "false", "threads of tokenizers do not survive the fork of data workers")


def _network(cluster: Cluster, node: int) -> Iterator[EnvVar]:
    yield EnvVar("NCCL_DEBUG", "WARN", "only errors, with their cause")
    if cluster.nodes == 1:
        return
    host = cluster.hosts[node] if cluster.hosts else None
    interface = host.socket_interface if host else None
    hcas = _hca_list(host, node) if host else ""
    if cluster.fabric.kind == "tcpxo":
        yield from _tcpxo(interface, hcas)
        return
    if interface:
        yield EnvVar(
            "NCCL_SOCKET_IFNAME",
            f"={interface}",
            "socket_interface in the spec; `=` keeps NCCL from matching it as a prefix",
        )
        yield EnvVar("GLOO_SOCKET_IFNAME", interface, "the same for Gloo, which expects plain names")
    if cluster.fabric.kind == "ethernet":
        yield EnvVar("NCCL_IB_DISABLE", "1", "fabric kind in the spec is ethernet, without RDMA")
    elif cluster.fabric.uses_verbs:
        yield from _verbs(cluster.fabric, hcas)


def _verbs(fabric: Fabric, hcas: str) -> Iterator[EnvVar]:
    if hcas:
        yield EnvVar("NCCL_IB_HCA", f"={hcas}", "hcas in the spec; without the `=`, mlx5_1 would match mlx5_10 too")
    if (traffic_class := fabric.traffic_class) is not None:
        reason = "traffic_class in the spec; NCCL's default is 0"
        if fabric.kind == "roce":
            reason = (
                f"traffic_class in the spec, DSCP {traffic_class >> 2}: selects the lossless queue; NCCL's default, 0,"
                " is a lossy queue where PFC follows DSCP"
            )
        yield EnvVar("NCCL_IB_TC", str(traffic_class), reason)
    if fabric.service_level is not None:
        reason = "service_level in the spec; NCCL's default is 0"
        yield EnvVar("NCCL_IB_SL", str(fabric.service_level), reason)


def _tcpxo(interface: str | None, interfaces: str) -> Iterator[EnvVar]:
    """Yield interface names without `=`: the plugin reads them too, and its checker compares them with its profile."""
    if interface:
        reason = "socket_interface in the spec: for NCCL, for Google's plugin, and for Gloo"
        for name in ("NCCL_SOCKET_IFNAME", "NCCL_FASTRAK_CTRL_DEV", "GLOO_SOCKET_IFNAME"):
            yield EnvVar(name, interface, reason)
    if interfaces:
        yield EnvVar("NCCL_FASTRAK_IFNAME", interfaces, "hcas in the spec: the GPUs' NICs")


def _hca_list(host: Host, node: int) -> str:
    if len(host.hcas) > _MOST_HCAS:
        raise SpecError(f"{len(host.hcas)} HCAs, and NCCL takes {_MOST_HCAS} at most", where=f"hosts[{node}].hcas")
    return ",".join(host.hcas)
