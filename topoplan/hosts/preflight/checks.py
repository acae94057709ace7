"""Checks for what would stop, hang or slow a run, based on the facts that its hosts report.

A failure would stop or hang the run, or make it train something else than intended; a warning may do so, or slows it;
what a host does not report is skipped, with the reason. These functions are pure: `preflight` asks the hosts. Row
numbers refer to the table of failures in docs/preflight.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from topoplan.errors import HostError, InputError, nearest
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.preflight import adapters, fabric, gpus, interfaces, software, storage, system
from topoplan.hosts.preflight.fleet import Check, Fleet, Node
from topoplan.hosts.result import Result
from topoplan.specs.cluster import Cluster

REACHABLE = "reachable"
CHECKS: Mapping[str, Check] = {
    "gpus": gpus.gpus_present,
    "gpu-kind": gpus.gpus_kind,
    "gpus-free": gpus.gpus_free,
    "gpus-distinct": gpus.gpus_distinct,
    "gpu-peer-access": gpus.peer_access,
    "cpu-cores": system.cpu_cores,
    "host-memory": system.host_memory,
    "shm": system.shm,
    "memlock": system.memlock,
    "clock": system.clock,
    "master-name": interfaces.master_name,
    "interface": interfaces.interface,
    "address": interfaces.address,
    "mtu": interfaces.mtu,
    "master-port-free": interfaces.master_port,
    "port-range": interfaces.port_range,
    "rdma-adapters": adapters.adapters,
    "roce-gid": adapters.gid,
    "roce-traffic-class": adapters.traffic_class,
    "gpudirect": adapters.peermem,
    "cloud": fabric.cloud,
    "fabric-files": fabric.fabric_files,
    "nccl-settings": fabric.nccl_settings,
    "python": software.python,
    "packages": software.packages,
    "versions": software.versions,
    "workdir": storage.workdir,
    "model": storage.model,
    "data": storage.data,
    "output": storage.output,
    "output-shared": storage.output_shared,
    "disk": storage.disk,
}
"""The checks of a host's facts by name, in the order in which they are shown."""
MASTER_REACHABLE, PORTS_OPEN = "master-port", "high-ports"
SECRETS = "secrets"
"""The check of this machine's own environment."""
NAMES = (SECRETS, REACHABLE, *CHECKS, MASTER_REACHABLE, PORTS_OPEN)


def run_checks(
    fleet: Fleet, reported: Mapping[str, HostFacts | HostError], *, skip: Collection[str] = ()
) -> tuple[Result, ...]:
    """Return the results, check by check and host by host.

    `reported` has one entry per host in the order of the cluster's hosts; those that answered are the nodes of `fleet`.
    Checks named in `skip` are left out.
    """
    results = [] if REACHABLE in skip else [_reachable(name, one) for name, one in reported.items()]
    for name, check in CHECKS.items():
        if name not in skip:
            found = ((node, check(fleet, node)) for node in fleet.nodes)
            results += [replace(one, name=name, host=node.name) for node, one in found if one is not None]
    return tuple(results)


def fleet_of(
    cluster: Cluster,
    needs: RunNeeds | None,
    reported: Mapping[str, HostFacts | HostError],
    *,
    query_times_s: Mapping[str, tuple[float, float]] | None = None,
) -> Fleet:
    """Return the hosts that answered, in the order of `cluster.hosts`.

    `reported` has one entry per host, by name; `query_times_s` has the times at which each was asked and had answered,
    in seconds since 1970 by our clock.
    """
    nodes = tuple(
        Node(number=number, name=name, host=host, facts=one, query_times_s=(query_times_s or {}).get(name))
        for number, (host, (name, one)) in enumerate(zip(cluster.hosts, reported.items(), strict=True))
        if isinstance(one, HostFacts)
    )
    return Fleet(cluster=cluster, needs=needs, nodes=nodes)


def refuse_unknown(names: Sequence[str], *, option: str) -> None:
    """Raise InputError for a name that is not the name of a check."""
    for name in names:
        if name not in NAMES:
            raise InputError(
                f"{name!r} is not a check",
                where=option,
                expected=nearest(name, NAMES) or f"known are {', '.join(NAMES)}",
            )


def _reachable(name: str, one: HostFacts | HostError) -> Result:
    """Row 9: a host that refuses the login, or does not answer."""
    if isinstance(one, HostError):
        what = one.what if one.host in ("", name) else f"{one.host}: {one.what}"
        return Result(name=REACHABLE, host=name, outcome="failure", what=what, remedy=one.remedy)
    return Result(name=REACHABLE, host=name, outcome="ok", what=one.hostname or "answers")
