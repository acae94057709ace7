"""Find and ask the hosts of a recorded run, and what the states of all nodes imply for it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from topoplan.errors import HostError, InputError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import logged_in
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import SshConfig, Target
from topoplan.run.node import NodeState, State
from topoplan.run.record import NodeRecord, RunRecord, RunState, load, now_text, update

T = TypeVar("T")

ENDED_STATES: tuple[State, ...] = ("ended", "gone", "rebooted")
"""States of a job that was started and is no longer there."""
_STOP_S = 90.0
"""Upper limit for the duration of a stop beside its grace: logins, also through jump hosts, and the final check."""
_CLOCK_S = 2
_TERMINATED = 128 + signal.SIGTERM


def targets_of(record: RunRecord, nodes: Sequence[NodeRecord]) -> dict[str, Target]:
    """Return the login targets of nodes by label. Raises InputError: the SSH configuration is wrong."""
    config = SshConfig(Path(record.ssh_config) if record.ssh_config else None)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda node: config.target(node.host), nodes)
        return dict(zip((node.label for node in nodes), found, strict=True))


def chosen(record: RunRecord, node: int | None) -> tuple[NodeRecord, ...]:
    """Return one node of the run, or all if `node` is None. Raises InputError: there is no such node."""
    found = tuple(one for one in record.nodes if node in (None, one.node))
    if not found:
        known = f"0 to {len(record.nodes) - 1}" if len(record.nodes) > 1 else "0"
        raise InputError(f"no node {node} in run {record.run_id}", where="--node", expected=f"expected {known}")
    return found


def ask_all(
    record: RunRecord, access: Access, job: Callable[[NodeRecord, Connection], T], *, deadline_s: float
) -> dict[str, T | HostError]:
    """Return the result of `job` for each node of the run, run concurrently, in node order; the error where it failed.

    Raises InputError: the SSH configuration is wrong.
    """
    nodes = {node.label: node for node in record.nodes}
    with logged_in(targets_of(record, record.nodes), access) as hosts:
        return hosts.ask(lambda label, connection: job(nodes[label], connection), deadline_s=deadline_s)


def exit_code(states: Mapping[str, NodeState | HostError]) -> int | None:
    """Return the exit code of the run: that of the node that failed first; 1 if its job ended without a code.

    Nodes that were ended because another one failed come last: those whose host says so, and of several that failed at
    nearly the same time those that SIGTERM ended, as a launch ends the others. While hosts do not know when, the first
    failure in node order counts. None while a job is running or cannot be asked about.
    """
    failed: list[tuple[bool, float, int]] = []
    for state in states.values():
        if isinstance(state, HostError) or state.state not in ENDED_STATES:
            return None
        code = 1 if state.code is None else state.code
        if code:
            late_s = _CLOCK_S if code == _TERMINATED else 0
            failed.append((bool(state.stopped), late_s - (state.ended_s_ago or 0.0), code))
    return min(failed, key=lambda one: one[:2])[-1] if failed else 0


def run_state(
    record: RunRecord, states: Mapping[str, NodeState | HostError]
) -> tuple[RunState | Literal["never-started", "unknown"], int | None]:
    """Return the state of a run and its exit code: as recorded once it is over, and as its hosts say before that.

    The hosts cannot tell a node that failed by itself from those that were stopped because of it, nor a failure from a
    stop. Only a job that still runs there contradicts the record.
    """
    found = {"unreachable" if isinstance(state, HostError) else state.state for state in states.values()}
    if "running" in found:
        return "running", None
    if record.is_over:
        return record.state, record.code
    if "unreachable" in found:
        return "unknown", None
    code = exit_code(states)
    if code is None:
        return "never-started", None
    return "failed" if code else "ended", code


def record_state(
    record: RunRecord,
    state: RunState,
    code: int | None = None,
    *,
    reason: str = "",
    codes: Mapping[str, int | None],
    left: tuple[str, ...] = (),
    trouble: str = "",
    unless_over: bool = False,
) -> RunRecord:
    """Write the current state into a run's record and return the record.

    `codes` are exit codes by node label; on the nodes `left` the run may still be running. With `unless_over`, for
    callers that have not watched to the end, an end recorded by another process stays. Raises InputError: the record is
    gone or cannot be used; OutputError: it cannot be written.
    """
    nodes = tuple(replace(node, code=codes.get(node.label, node.code)) for node in record.nodes)
    ended = now_text() if state in ("ended", "failed", "stopped") else None
    changes = {"state": state, "code": code, "reason": reason, "ended": ended, "nodes": nodes, "left": left}
    changes["trouble"] = trouble or record.trouble
    return update(record.run_id, unless_over=unless_over, **changes)


def record_stop_request(run_id: str, grace_s: float) -> None:
    """Record that the run is about to be stopped, so that watchers do not take what ends then for a failure.

    `grace_s` is the time from SIGTERM to SIGKILL. A full disk does not prevent a stop.
    """
    with contextlib.suppress(InputError):
        known = load(run_id)
        if known.is_over:
            return
        since_s = _since_stop_s(known, time.time())
        if since_s is None:
            update(run_id, stop_asked=now_text(), stop_grace_s=grace_s)
        elif since_s + grace_s > known.stop_grace_s:
            update(run_id, stop_grace_s=since_s + grace_s)


def grace_of_stop_s(run_id: str, ended_s: float) -> float | None:
    """Return the grace period of a stop, or None if no stop is why a node ended at `ended_s` of `time.monotonic`."""
    try:
        known = load(run_id)
    except InputError:
        return None
    since_s = _since_stop_s(known, time.time() - time.monotonic() + ended_s)
    return None if since_s is None else known.stop_grace_s


def _since_stop_s(record: RunRecord, unix_s: float) -> float | None:
    """Return seconds from the request to stop the run until `unix_s`; None if nobody had asked.

    None too if that was so long before that it is not the reason: whoever asked may have reached no host.
    """
    if record.stop_asked is None:
        return None
    since_s = unix_s - datetime.fromisoformat(record.stop_asked).timestamp()
    return since_s if 0 <= since_s <= record.stop_grace_s + _STOP_S else None


def record_end_of(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> RunRecord:
    """Return the record, with the end of the run if all nodes have ended: the client that started it may be gone.

    Raises InputError and OutputError, as `record_state`.
    """
    code = exit_code(states)
    if record.is_over or code is None or len(states) < len(record.nodes):
        return record
    # The first failure, by clocks with whole seconds, or the last good end: some trainers answer a stop with 0. If no
    # host knows, a stop request is taken as the reason.
    ended = [state for state in states.values() if isinstance(state, NodeState) and (state.code != 0 or code == 0)]
    known_s = [state.ended_s_ago for state in ended if state.ended_s_ago is not None]
    if known_s:
        ago_s = max(known_s) - _CLOCK_S if code else min(known_s)
        stopped = _since_stop_s(record, time.time() - ago_s) is not None
    else:
        stopped = record.stop_asked is not None
    over: RunState = "stopped" if stopped else "failed" if code else "ended"
    codes = {label: state.code for label, state in states.items() if isinstance(state, NodeState)}
    return record_state(record, over, code, codes=codes, unless_over=True)
