"""`topoplan runs logs`: print what the jobs of a run have written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from topoplan.cli.options import option
from topoplan.cli.ssh_options import AcceptNew, RunReference, access

if TYPE_CHECKING:
    from topoplan.cli.node_output import NodeOutput
    from topoplan.errors import HostError
    from topoplan.remote.fanout import Hosts
    from topoplan.remote.identities import Access
    from topoplan.remote.ssh_config import Target
    from topoplan.run.events import Event
    from topoplan.run.record import NodeRecord, RunRecord


def logs(
    run: RunReference = "last",
    follow: Annotated[bool, option("-f --follow", "Go on until the jobs have ended.")] = False,
    node: Annotated[int | None, option("--node N", "This node only.", min=0)] = None,
    tail: Annotated[int | None, option("--tail N", "The last N lines only.", min=0)] = None,
    raw: Annotated[bool, option("--raw", "The bytes as they are, with all that a terminal obeys in them.")] = False,
    accept_new: AcceptNew = False,
) -> int:
    """Reads the logs on the hosts; for a host that cannot be reached, the local copy.

    With several nodes, each line is prefixed with its node. Colors and anything else that a terminal would interpret
    are removed or escaped, and of a progress bar only the last state is shown; --raw keeps everything. Exit code 1 if a
    host could not be reached.
    """
    from topoplan.cli.node_output import NodeOutput, warn
    from topoplan.errors import HostError
    from topoplan.remote.fanout import logged_in
    from topoplan.run import record
    from topoplan.run.outcome import chosen, targets_of

    known = record.load(run)
    nodes = {one.label: one for one in chosen(known, node)}
    output = NodeOutput(prefix=len(nodes) > 1, raw=raw)
    who = access(accept_new=accept_new)
    targets = targets_of(known, tuple(nodes.values()))
    with logged_in(targets, who) as hosts:
        for label, error in hosts.errors.items():
            _from_copy(known, nodes[label], error, tail, output)
        states = _follow(nodes, targets, who, hosts, tail, output) if follow else _print(nodes, hosts, tail, output)
    for label, state in states.items():
        if isinstance(state, HostError):
            warn(str(state))
        elif not state:
            warn(f"{label}: no log on {nodes[label].name}; its job was not started, or was removed")
    return int(bool(hosts.errors) or not all(state is True for state in states.values()))


_OPEN_S = 20.0
_COPY_BYTES = 2**20


def _print(
    nodes: Mapping[str, NodeRecord], hosts: Hosts, tail: int | None, output: NodeOutput
) -> dict[str, bool | HostError]:
    """Print the present logs one after the other; return for each node whether it has one."""
    from topoplan.errors import HostError
    from topoplan.remote.connection import Chunk
    from topoplan.remote.fanout import run_on_all
    from topoplan.run.node import read_log

    found: dict[str, bool | HostError] = {}
    streams = run_on_all(
        hosts.connections,
        lambda label, host: read_log(host, nodes[label].run_dir, tail_lines=tail),
        deadline_s=_OPEN_S,
    )
    for label, stream in streams.items():
        if isinstance(stream, HostError):
            found[label] = stream
            continue
        for item in stream:
            if not isinstance(item, Chunk):
                found[label] = item.lost or item.code == 0
            elif item.source == "stdout":
                output.add(label, item.data)
        output.end(label)
    return found


def _follow(
    nodes: Mapping[str, NodeRecord],
    targets: Mapping[str, Target],
    who: Access,
    hosts: Hosts,
    tail: int | None,
    output: NodeOutput,
) -> dict[str, bool | HostError]:
    """Print the logs until the jobs have ended, across lost connections; return for each node whether it has one."""
    from topoplan.cli.node_output import warn
    from topoplan.remote.ssh import connect
    from topoplan.run.watch import Watch
    from topoplan.run.watched import WatchedNode

    watched = [
        WatchedNode.of(nodes[label], connection, log=None, tail_lines=tail)
        for label, connection in hosts.connections.items()
    ]

    def tell(event: Event) -> None:
        if event.kind == "ended":
            output.end(event.node)
        elif event.kind == "connection" or "unseen_s" in event.data:
            warn(f"{event.node}: {event.text}" if event.node else event.text)

    watch = Watch(
        watched,
        tell=tell,
        reconnect=lambda label, deadline_s: connect(targets[label], who, deadline_s=deadline_s),
        on_data=output.add,
    )
    try:
        watch.until(lambda: False)
    finally:
        watch.close()
        for node in watched:
            if node.connection is not None:
                node.connection.close()
    return {
        node.name: node.given_up or (node.state is not None and node.state.state != "never-started") for node in watched
    }


def _from_copy(known: RunRecord, node: NodeRecord, error: HostError, tail: int | None, output: NodeOutput) -> None:
    from topoplan.cli.node_output import warn

    path = known.log(node)
    if not path.exists():
        warn(f"{error}; there is no copy of its log on this machine")
        return
    warn(f"{error}; what follows is {path}, which may lack the end")
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(_COPY_BYTES), b"")
        output.copy(node.label, blocks if tail is None else deque(file, maxlen=tail))
