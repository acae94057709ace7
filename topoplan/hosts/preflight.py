"""What would stop, hang or slow a run, read from what its hosts say of themselves.

A failure would stop or hang the run, or train something else than was asked for; a warning may do so, or slows it; what
a host does not say is skipped, with the reason. Pure: hosts are asked by `launch.checks`. Rows are those of the table
of failures in docs/preflight.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from topoplan.errors import HostError, InputError, nearest
from topoplan.hosts import check_fabric, check_gpus, check_network, check_software, check_storage, check_system
from topoplan.hosts.check import Check
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.scene import Look, Node, Scene
from topoplan.specs.cluster import Cluster

REACHABLE = "reachable"
LOOKS: Mapping[str, Look] = {
    "gpus": check_gpus.gpus_present,
    "gpu-kind": check_gpus.gpus_kind,
    "gpus-free": check_gpus.gpus_free,
    "gpus-distinct": check_gpus.gpus_distinct,
    "gpu-peer-access": check_gpus.peer_access,
    "cpu-cores": check_system.cpu_cores,
    "host-memory": check_system.host_memory,
    "shm": check_system.shm,
    "memlock": check_system.memlock,
    "clock": check_system.clock,
    "master-name": check_network.master_name,
    "interface": check_network.interface,
    "address": check_network.address,
    "mtu": check_network.mtu,
    "master-port-free": check_network.master_port,
    "port-range": check_network.port_range,
    "rdma-adapters": check_network.adapters,
    "roce-gid": check_network.gid,
    "roce-traffic-class": check_network.traffic_class,
    "gpudirect": check_network.peermem,
    "cloud": check_fabric.cloud,
    "fabric-files": check_fabric.fabric_files,
    "nccl-settings": check_network.nccl_settings,
    "python": check_software.python,
    "packages": check_software.packages,
    "versions": check_software.versions,
    "workdir": check_storage.workdir,
    "model": check_storage.model,
    "data": check_storage.data,
    "output": check_storage.output,
    "disk": check_storage.disk,
}
"""The checks on what a host says, by name, in the order in which they are shown."""
MASTER_REACHABLE, PORTS_OPEN = "master-port", "high-ports"
"""The checks of `network`."""
SECRETS = "secrets"
"""The check of this machine's own environment."""
NAMES = (SECRETS, REACHABLE, *LOOKS, MASTER_REACHABLE, PORTS_OPEN)


def preflight(
    cluster: Cluster,
    needs: RunNeeds | None,
    said: Mapping[str, HostFacts | HostError],
    *,
    asked: Mapping[str, tuple[float, float]] | None = None,
    skip: Collection[str] = (),
) -> tuple[Check, ...]:
    """What to say of the hosts, check by check and host by host.

    `said` has one entry a host in the order of `cluster.hosts`, by the name that it goes by; `asked` when each was
    asked and had answered, in seconds since 1970 by our clock. Checks named in `skip` are left out.
    """
    scene = scene_of(cluster, needs, said, asked=asked)
    checks = [] if REACHABLE in skip else [_reachable(name, one) for name, one in said.items()]
    for check, look in LOOKS.items():
        if check in skip:
            continue
        for node in scene.nodes:
            found = look(scene, node)
            if found is not None:
                checks.append(
                    Check(name=check, host=node.name, outcome=found.outcome, what=found.what, remedy=found.remedy)
                )
    return tuple(checks)


def scene_of(
    cluster: Cluster,
    needs: RunNeeds | None,
    said: Mapping[str, HostFacts | HostError],
    *,
    asked: Mapping[str, tuple[float, float]] | None = None,
) -> Scene:
    """The hosts that answered, as checks see them."""
    nodes = tuple(
        Node(number=number, name=name, host=host, facts=one, asked=(asked or {}).get(name))
        for number, (host, (name, one)) in enumerate(zip(cluster.hosts, said.items(), strict=True))
        if isinstance(one, HostFacts)
    )
    return Scene(cluster=cluster, needs=needs, nodes=nodes)


def check_names(names: Sequence[str], *, option: str) -> None:
    """Raises InputError for what is not the name of a check."""
    for name in names:
        if name not in NAMES:
            raise InputError(
                f"{name!r} is not a check",
                where=option,
                expected=nearest(name, NAMES) or f"known are {', '.join(NAMES)}",
            )


def _reachable(name: str, one: HostFacts | HostError) -> Check:
    """Row 9: a host that cannot be logged in to, or does not answer."""
    if isinstance(one, HostError):
        what = one.what if one.host in ("", name) else f"{one.host}: {one.what}"
        return Check(name=REACHABLE, host=name, outcome="failure", what=what, remedy=one.remedy)
    return Check(name=REACHABLE, host=name, outcome="ok", what=one.hostname or "answers")
