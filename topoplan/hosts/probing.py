"""Ask hosts what they are: one login and one script for each, all at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.errors import HostError
from topoplan.hosts.collect import COLLECT_S, Wanted, collect_script, host_facts
from topoplan.hosts.probed import Probed, asked_addresses
from topoplan.remote.connection import Connection, no_script
from topoplan.remote.fanout import connect_all, run_on_all
from topoplan.remote.keys import Access
from topoplan.remote.ssh_config import Target
from topoplan.specs.cluster import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What came of asking."""

    reached: tuple[Probed, ...]
    failed: Mapping[str, HostError]


def ask_hosts(
    hosts: Sequence[Host],
    targets: Mapping[str, Target],
    access: Access,
) -> Asked:
    """What the hosts say; `targets` are those of `hosts`, in their order. A host that fails stops no other."""
    routes = asked_addresses(
        [(host.address, target.hostname) for host, target in zip(hosts, targets.values(), strict=True)]
    )
    wanted = {
        name: Wanted(
            routes=routes,
            places=(host.workdir,) if host.workdir else (),
            python=f"{host.venv}/bin/python" if host.venv else None,
        )
        for name, host in zip(targets, hosts, strict=True)
    }
    results = connect_all(targets, access)
    connections = {name: result for name, result in results.items() if isinstance(result, Connection)}
    failed = {name: result for name, result in results.items() if isinstance(result, HostError)}
    try:
        answers = run_on_all(
            connections,
            lambda name, connection: connection.run(collect_script(wanted[name]), deadline_s=COLLECT_S),
            deadline_s=COLLECT_S + 5,
        )
    finally:
        for connection in connections.values():
            connection.close()
    reached = []
    for host, (name, target) in zip(hosts, targets.items(), strict=True):
        answer = failed.get(name) or answers[name]
        if isinstance(answer, HostError):
            failed[name] = answer
            continue
        facts = host_facts(answer.stdout)
        if not facts.hostname:
            failed[name] = no_script(target, answer.stderr)
            continue
        reached.append(
            Probed(name=name, host=host, hostname=target.hostname, user=target.user, port=target.port, facts=facts)
        )
    return Asked(reached=tuple(reached), failed={name: failed[name] for name in targets if name in failed})
