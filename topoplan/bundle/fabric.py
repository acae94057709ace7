"""What the network between the nodes requires of each host, for its script, the README and preflight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from topoplan.catalog.fabrics import Need, needs_of_kind, topology_file
from topoplan.specs.cluster import Cluster
from topoplan.trainers.environment import SOCKET_INTERFACES


def fabric_needs(cluster: Cluster) -> tuple[Need, ...]:
    """Return the files that every host must have for its network; none for a single node. A path in the spec's `env`
    replaces the usual ones, and a plugin named there is accepted as it is."""
    return tuple(_needs(cluster)) if cluster.nodes > 1 else ()


def _needs(cluster: Cluster) -> Iterator[Need]:
    for need in needs_of_kind(cluster.fabric.kind):
        given = cluster.env.get(need.variable)
        if given is None:
            yield need
        elif need.use != "library":
            path = given if need.use == "path" else str(PurePosixPath(given, PurePosixPath(need.paths[0]).name))
            yield need._replace(paths=(path,), missing=f"no {path}, given by {need.variable} in env of the spec")
    if file := cluster.env.get("NCCL_TOPO_FILE") or cluster.fabric.topology_file:
        yield topology_file(file)


def network_notes(cluster: Cluster) -> tuple[str, ...]:
    """Return advice on what the spec leaves open about the network between the nodes."""
    return tuple(filter(None, (lossless_note(cluster), _interface_note(cluster))))


def _interface_note(cluster: Cluster) -> str:
    if cluster.nodes == 1 or cluster.fabric.kind != "ethernet" or any(host.socket_interface for host in cluster.hosts):
        return ""
    lacking = [name for name in SOCKET_INTERFACES if name not in cluster.env]
    if not lacking:
        return ""
    return (
        "The spec names no network interface, so NCCL and Gloo choose one themselves. If that is a slow or an"
        " unreachable one (`docker0`, a management network), NCCL hangs at the first collective: give each of the"
        f" spec's `hosts` its `socket_interface`, or set {' and '.join(f'`{name}`' for name in lacking)} under `env`"
    )


def lossless_note(cluster: Cluster) -> str:
    """Return advice for a RoCE network of which the spec gives no traffic class, or an empty string."""
    fabric = cluster.fabric
    if cluster.nodes == 1 or fabric.kind != "roce" or fabric.traffic_class is not None or "NCCL_IB_TC" in cluster.env:
        return ""
    return (
        "RoCE needs a lossless queue. If the switches select it by DSCP (PFC), NCCL's default traffic class, 0, is sent"
        " to another queue, which drops packets under load: training is then slow, without any message. Ask the"
        " network's administrators for the class, and set it as `traffic_class` under `fabric` in the spec"
    )
