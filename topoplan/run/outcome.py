"""What the states of all nodes say of their run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from topoplan.errors import HostError, InputError
from topoplan.run.node import NodeState, State
from topoplan.run.record import RunRecord, RunState, load, now_text, update

OVER: tuple[State, ...] = ("ended", "gone", "rebooted")
"""A job that was started and is not there any more."""
_STOP_S = 90.0
"""What stopping takes at most beside its grace: to log in, behind jump hosts too, and to look whether all is gone."""
_CLOCK_S = 2


def exit_code(states: Mapping[str, NodeState | HostError]) -> int | None:
    """Of the run: the first code that is not 0, in the order of the nodes; 1 where a job has ended without one. Nodes
    that were ended because another had failed come last.

    None while a job runs or cannot be asked about.
    """
    worst = stopped = 0
    for state in states.values():
        if isinstance(state, HostError) or state.state not in OVER:
            return None
        code = 1 if state.code is None else state.code
        worst, stopped = (worst, stopped or code) if state.stopped else (worst or code, stopped)
    return worst or stopped


def note(
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
    """The record with how the run is now in it; `codes` are exit codes of nodes by their labels, and `left` those on
    which it may run on.

    `unless_over` is for who has not seen the run to its end: what another process has noted meanwhile stays.

    Raises:
        InputError: it is not there any more, or cannot be used.
        OutputError: it cannot be written.
    """
    nodes = tuple(replace(node, code=codes.get(node.label, node.code)) for node in record.nodes)
    ended = now_text() if state in ("ended", "failed", "stopped") else None
    changes = {"state": state, "code": code, "reason": reason, "ended": ended, "nodes": nodes, "left": left}
    changes["trouble"] = trouble or record.trouble
    return update(record.run_id, unless_over=unless_over, **changes)


def note_stop(run_id: str, grace_s: float) -> None:
    """Note that the run is about to be stopped, so that who watches it takes what ends then for no failure.

    `grace_s` is from SIGTERM to SIGKILL. A disk that is full keeps nobody from stopping.
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


def stopped_with_grace_s(run_id: str, ended_s: float) -> float | None:
    """The grace of who stopped the run, where that is why a node ended at a moment of `time.monotonic`; else None."""
    try:
        known = load(run_id)
    except InputError:
        return None
    since_s = _since_stop_s(known, time.time() - time.monotonic() + ended_s)
    return None if since_s is None else known.stop_grace_s


def _since_stop_s(record: RunRecord, unix_s: float) -> float | None:
    """From when somebody asked to stop the run to this moment.

    None where nobody had, or so long before that what ends now does not because of it: who asked may have been
    interrupted, or have reached no host.
    """
    if record.stop_asked is None:
        return None
    since_s = unix_s - datetime.fromisoformat(record.stop_asked).timestamp()
    return since_s if 0 <= since_s <= record.stop_grace_s + _STOP_S else None


def noted(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> RunRecord:
    """The record, where all its nodes have ended with that noted in it: the client that started it may be gone.

    Raises:
        InputError, OutputError: as `note`.
    """
    code = exit_code(states)
    if record.is_over or code is None or len(states) < len(record.nodes):
        return record
    # The first that failed, by clocks with whole seconds, or the last of good ends: some trainers answer a stop with 0.
    # Where no host knows, whoever asked to stop has the blame.
    ended = [state for state in states.values() if isinstance(state, NodeState) and (state.code != 0 or code == 0)]
    known_s = [state.ended_s_ago for state in ended if state.ended_s_ago is not None]
    if known_s:
        ago_s = max(known_s) - _CLOCK_S if code else min(known_s)
        stopped = _since_stop_s(record, time.time() - ago_s) is not None
    else:
        stopped = record.stop_asked is not None
    over: RunState = "stopped" if stopped else "failed" if code else "ended"
    codes = {label: state.code for label, state in states.items() if isinstance(state, NodeState)}
    return note(record, over, code, codes=codes, unless_over=True)
