"""The preflight over SSH: one round in which hosts report facts, and one in which they connect to each other."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping

from topoplan.bundle.fabric import fabric_needs
from topoplan.errors import HostError
from topoplan.hosts.collect import COLLECT, COLLECT_S, CollectRequest, collect_arguments, host_facts
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.needs import RunNeeds, paths_on, python_on
from topoplan.hosts.preflight.checks import MASTER_REACHABLE, PORTS_OPEN, fleet_of, run_checks
from topoplan.hosts.preflight.connections import (
    CONNECT_S,
    SCRIPT,
    Listening,
    Peer,
    arguments,
    connection_results,
    peer_line,
    peers_of,
    read_listening,
    read_results,
)
from topoplan.hosts.preflight.fleet import Fleet
from topoplan.hosts.result import Result
from topoplan.remote.connection import Chunk, Connection, Stream
from topoplan.remote.fanout import run_on_all
from topoplan.remote.waiting import Deadline
from topoplan.specs.cluster import Cluster, Host

_START_S = 10.0
"""Time for Python to start and to listen, also on a busy machine."""
_END_S = 3.0
_SPARE_S = 5.0
"""Time granted to a host beyond its own deadline before its connection is closed."""
_LINE_BYTES = 2**22

_Asked = tuple[float, HostFacts, float]


def preflight(
    connections: Mapping[str, Connection | HostError],
    cluster: Cluster,
    needs: RunNeeds | None,
    *,
    skip: Collection[str] = (),
) -> tuple[Result, ...]:
    """Check the hosts of a cluster for a run, or with `needs` None for any run.

    `connections` has one entry per host in the order of `cluster.hosts`; a failed one fails `reachable`. Takes some
    seconds; nothing is changed or left running on the hosts, and the connections stay open.
    """
    hosts = dict(zip(connections, cluster.hosts, strict=True))
    open_ones = {name: one for name, one in connections.items() if isinstance(one, Connection)}
    answers = run_on_all(
        open_ones,
        lambda name, one: _ask(one, collect_request(cluster, hosts[name], needs)),
        deadline_s=COLLECT_S + _SPARE_S,
    )
    reported: dict[str, HostFacts | HostError] = {}
    query_times_s: dict[str, tuple[float, float]] = {}
    for name, one in connections.items():
        answer = one if isinstance(one, HostError) else answers[name]
        if isinstance(answer, HostError):
            reported[name] = answer
        else:
            sent, reported[name], answered = answer
            query_times_s[name] = (sent, answered)
    fleet = fleet_of(cluster, needs, reported, query_times_s=query_times_s)
    results = run_checks(fleet, reported, skip=skip)
    if cluster.nodes == 1 or {MASTER_REACHABLE, PORTS_OPEN} <= set(skip):
        return results
    return results + _connect(fleet, {node.name: open_ones[node.name] for node in fleet.nodes}, skip)


def collect_request(cluster: Cluster, host: Host, needs: RunNeeds | None) -> CollectRequest:
    """Return what to ask a host in the first round."""
    paths = paths_on(host, needs)
    network = (path for need in fabric_needs(cluster) for path in need.paths if path.startswith("/"))
    return CollectRequest(
        paths=tuple(path for path in paths if path != host.workdir),
        places=(*(path for path in paths if path == host.workdir), *network),
        routes=(cluster.hosts[0].address.strip("[]"),) if cluster.nodes > 1 else (),
        python=python_on(host),
    )


def _ask(connection: Connection, request: CollectRequest) -> _Asked:
    sent = time.time()
    done = connection.run(COLLECT, *collect_arguments(request), deadline_s=COLLECT_S)
    return sent, host_facts(done.stdout), time.time()


def _connect(fleet: Fleet, connections: Mapping[str, Connection], skip: Collection[str]) -> tuple[Result, ...]:
    nodes = {node.name: node for node in fleet.nodes}
    choice = random.Random()
    tasks = {name: arguments(fleet, node, choice) for name, node in nodes.items()}
    streams: dict[str, Stream] = {}

    def listen(name: str, connection: Connection) -> Listening | str:
        stream = connection.start(SCRIPT, *tasks[name], hold_stdin=True, deadline_s=_START_S)
        streams[name] = stream
        return read_listening(_line(stream, _START_S))

    def connect(name: str, _: Connection) -> tuple[tuple[Peer, ...], bytes]:
        peers = tuple(peers_of(fleet, nodes[name], listening))
        if not isinstance(listening[name], Listening):
            return peers, b""
        streams[name].write(peer_line(peers))
        # With hundreds of hosts, some connections have to wait for others.
        return peers, _line(streams[name], 3 * CONNECT_S + _START_S)

    def end(name: str, _: Connection) -> None:
        streams[name].end_stdin()
        for _item in streams[name].read(_END_S):
            pass

    try:
        listening = run_on_all(connections, listen, deadline_s=2 * _START_S + _SPARE_S)
        lines = run_on_all(connections, connect, deadline_s=3 * CONNECT_S + _START_S + _SPARE_S)
        running = {name: one for name, one in connections.items() if name in streams}
        run_on_all(running, end, deadline_s=_END_S + _SPARE_S)
    finally:
        for stream in streams.values():
            stream.close()
    results = {
        name: line if isinstance(line, HostError) else read_results(line[1], line[0]) for name, line in lines.items()
    }
    return connection_results(fleet, listening, results, skip=skip)


def _line(stream: Stream, limit_s: float) -> bytes:
    """Return the next line of the output, or a part of it if the output ends or the time limit is reached."""
    line = bytearray()
    for item in stream.read(Deadline(limit_s).left_s):
        if isinstance(item, Chunk) and item.source == "stdout":
            line += item.data
            if b"\n" in item.data or len(line) > _LINE_BYTES:
                break
        elif not isinstance(item, Chunk) and item.lost is not None:
            raise item.lost
    return bytes(line)
