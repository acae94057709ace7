"""`topoplan logs`: what the jobs of a run have written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.ssh_options import AcceptNew, RunReference, access

if TYPE_CHECKING:
    from topoplan.errors import HostError
    from topoplan.launch.record import NodeRecord, RunRecord


def logs(
    run: RunReference = "last",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the jobs have ended.")] = False,
    node: Annotated[
        int | None, typer.Option("--node", metavar="N", min=0, help="This node only.", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="The last N lines only.", show_default=False)
    ] = None,
    accept_new: AcceptNew = False,
) -> int:
    """Print the logs of a run's nodes, from the hosts; of a host that cannot be reached, the copy on this machine.

    Lines of several nodes begin with the node; one node's come as they are. Exit code 1 if a host could not be reached.
    """
    from topoplan.cli.node_output import show_streams, warn
    from topoplan.errors import HostError
    from topoplan.launch import record
    from topoplan.launch.connection import Stream
    from topoplan.launch.node import follow_node, read_log
    from topoplan.launch.reach import ask_all, chosen, reach

    known = record.load(run)
    nodes = chosen(known, node)
    several = len(nodes) > 1
    failed = False
    with reach(known, access(accept_new=accept_new), nodes) as reached:
        begin = follow_node if follow else read_log
        opened = ask_all(reached, lambda one, host: begin(host, one.run_dir, tail_lines=tail), deadline_s=_OPEN_S)
        streams: dict[str, Stream] = {}
        for label, result in opened.items():
            if isinstance(result, HostError):
                failed = True
                _from_copy(known, reached.nodes[label], result, tail, prefix=several)
            else:
                streams[label] = result
        # One after the other, unless they are followed: then as they come.
        groups = [streams] if follow else [{label: stream} for label, stream in streams.items()]
        for group in groups:
            for label, end in show_streams(group, prefix=several).items():
                if isinstance(end, HostError):
                    failed = True
                    warn(str(end))
                elif end != 0 and not follow:
                    failed = True
                    warn(f"{label}: no log on {reached.nodes[label].name}; its job was not started, or was removed")
    return int(failed)


_OPEN_S = 20.0
_COPY_BYTES = 2**20


def _from_copy(known: RunRecord, node: NodeRecord, error: HostError, tail: int | None, *, prefix: bool) -> None:
    from topoplan.cli.node_output import warn, write_lines

    path = known.log(node)
    if not path.exists():
        warn(f"{error}; there is no copy of its log on this machine")
        return
    warn(f"{error}; what follows is {path}, which may lack the end")
    write_lines(node.label, _lines(path) if tail is None else deque(_lines(path), maxlen=tail), prefix=prefix)


def _lines(path: Path) -> Iterator[bytes]:
    from topoplan.launch.lines import Lines

    lines = Lines()
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            yield from lines.add(data)
    yield from lines.rest()
