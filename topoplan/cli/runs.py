"""`topoplan runs`: list the runs started from this machine, and manage one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.options import AsJson, option
from topoplan.cli.output import show, stdout_console, warn
from topoplan.cli.ssh_options import AcceptNew, Grace, HangAfter, LostHostAfter, RunReference, access, time_option
from topoplan.errors import HostError, InputError

if TYPE_CHECKING:
    from topoplan.cli.live_output import NodeOutput
    from topoplan.remote.fanout import Hosts
    from topoplan.remote.identities import Access
    from topoplan.remote.ssh_config import Target
    from topoplan.run.events import Event
    from topoplan.run.record import NodeRecord, RunRecord


def runs(
    ctx: typer.Context,
    measured: Annotated[
        bool, option("--measured", "What each took, beside what was predicted, for those that tell.")
    ] = False,
    prune: Annotated[
        bool, option("--prune", "Forget those that have ended, with the copies of their logs here.")
    ] = False,
    older_than: Annotated[
        float | None, time_option("--older-than", "Of those only what ended so long ago, such as 30d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the runs that this user started from this machine, as last seen here; `runs status` queries the hosts.
    `topoplan calibrate --runs` learns from them.

    --prune touches no host. Runs not known to have ended are kept, and so are records that cannot be read.
    """
    if verb := ctx.invoked_subcommand:
        if as_json:
            raise InputError("--json goes behind the verb", remedy=f"as in `topoplan runs {verb} --json`")
        return

    from topoplan.report.runs import print_measured, print_pruned, print_runs, pruned_to_dict, runs_to_dict
    from topoplan.run import record

    if older_than is not None and not prune:
        raise InputError("--older-than says what to forget", remedy="give --prune too")
    if prune:
        gone, freed_bytes = record.prune(older_than or 0.0)
        show(as_json, pruned_to_dict, print_pruned, gone, freed_bytes)
        return
    found = record.runs()
    if measured and not as_json:
        from topoplan.run.measurement import why_unmeasured

        print_measured(stdout_console(), found, why_unmeasured)
        return
    show(as_json, runs_to_dict, print_runs, found)


ASK_S = 15.0
"""Seconds for a host to report the state of its job."""


def status(run: RunReference = "last", accept_new: AcceptNew = False, as_json: AsJson = False) -> int:
    """Exit code 0 if every host answered, whatever the answer; 1 if one did not."""
    from topoplan.report.runs import print_status, status_to_dict
    from topoplan.run import record
    from topoplan.run.node import node_state
    from topoplan.run.outcome import ask_all, record_end_of

    known = record.load(run)
    states = ask_all(
        known,
        access(accept_new=accept_new),
        lambda node, host: node_state(host, node.run_dir, started=node.started, deadline_s=ASK_S),
        deadline_s=ASK_S + 1,
    )
    try:
        known = record_end_of(known, states)
    except InputError as error:
        warn(str(error))
    show(as_json, status_to_dict, print_status, known, states)
    return int(any(isinstance(state, HostError) for state in states.values()))


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
    from topoplan.cli.live_output import NodeOutput
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
    path = known.log(node)
    if not path.exists():
        warn(f"{error}; there is no copy of its log on this machine")
        return
    warn(f"{error}; what follows is {path}, which may lack the end")
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(_COPY_BYTES), b"")
        output.copy(node.label, blocks if tail is None else deque(file, maxlen=tail))


def attach(
    run: RunReference = "last",
    tail: Annotated[int, option("--tail N", "Lines of the past to begin with.", min=0)] = 10,
    stop_on_failure: Annotated[
        bool, option("--stop-on-failure/--no-stop-on-failure", "Stop the others when a node fails, or leave them.")
    ] = True,
    grace: Grace = 10.0,
    lost_host_after: LostHostAfter = None,
    hang_after: HangAfter = None,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> int:
    """Shows the output of all nodes, each line prefixed with its node, and the training progress.

    Ctrl-C leaves the run as it is. If a node fails, the others are stopped, as with `launch`; with
    --no-stop-on-failure, the nodes that still run are reported instead. The local copies of the logs are continued. A
    host that cannot be reached is retried until it can; --lost-host-after gives it up, and stops the run if other hosts
    can be reached.

    Exit code: that of the first node that failed; 0 if all ended well; 1: a host was given up; 2: bad input; 130:
    Ctrl-C.
    """
    from topoplan.cli.live_output import EventOutput
    from topoplan.report.session import ATTACH, attach_lines, outcome_to_dict
    from topoplan.run import record
    from topoplan.run.attach import AttachSession
    from topoplan.run.settings import Settings

    settings = Settings(
        tail_lines=tail,
        stop_on_failure=stop_on_failure,
        grace_s=grace,
        lost_after_s=lost_host_after,
        hang_after_s=hang_after,
    )
    known = record.load(run)
    output = EventOutput(ATTACH if as_json else None)
    with Interrupts(endings=True) as interrupts:
        outcome = AttachSession(
            known,
            output.access(accept_new=accept_new),
            settings=settings,
            tell=output.tell,
            # When standard output is closed, nobody is watching any more.
            interrupts=lambda: interrupts.count or interrupts.ending or output.reader_has_left,
        ).go()
        if outcome.end == "left" and not interrupts.wants_out:
            return 0
        if outcome.end == "left" and interrupts.ending:
            outcome = replace(outcome, code=128 + interrupts.ending)
        output.end(outcome_to_dict(outcome, ATTACH), attach_lines(outcome), outcome.code, interrupts)
    return outcome.code


_MARGIN_S = 15.0
"""Seconds for a host on top of the grace period and the wait after SIGKILL."""


def stop(
    run: RunReference = "last",
    grace: Grace = 10.0,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> int:
    """Verifies that the run has ended. Without RUN, other runs that are not known to have ended are named.

    Exit code 0 if nothing of it is left on any host; 1 if something is, or a host could not be queried.
    """
    from topoplan.report.runs import is_stopped, print_stop, stop_to_dict
    from topoplan.run import record
    from topoplan.run.node import SETTLE_S, stop_node
    from topoplan.run.outcome import ask_all, record_stop_request
    from topoplan.units import named

    known = record.load(run)
    others = [one.run_id for one in record.unfinished() if one.run_id != known.run_id] if run == record.LAST else []
    limit_s = grace + SETTLE_S + _MARGIN_S
    record_stop_request(known.run_id, grace)
    results = ask_all(
        known,
        access(accept_new=accept_new),
        lambda node, host: stop_node(host, node.run_dir, started=node.started, grace_s=grace, deadline_s=limit_s),
        deadline_s=limit_s + 1,
    )
    if is_stopped(results):
        try:
            end = {"state": "stopped", "ended": record.now_text(), "reason": "topoplan runs stop"}
            record.update(known.run_id, unless_over=True, **end)
            record.update(known.run_id, left=())
        except InputError as error:
            warn(str(error))
    show(as_json, stop_to_dict, print_stop, known, results)
    if others:
        warn(f"not known to have ended: {named(others)}; `topoplan runs stop {others[0]}` ends that one")
    return int(not is_stopped(results))
