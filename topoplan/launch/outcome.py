"""What the states of all nodes say of their run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from topoplan.errors import HostError, InputError
from topoplan.launch.node import NodeState, State
from topoplan.launch.record import RunRecord, RunState, load, now_text, update

OVER: tuple[State, ...] = ("ended", "gone", "rebooted")
"""A job that was started and is not there any more."""


def exit_code(states: Mapping[str, NodeState | HostError]) -> int | None:
    """Of the run: the first code that is not 0, in the order of the nodes; 1 where a job has ended without one.

    None while a job runs or cannot be asked about.
    """
    worst = 0
    for state in states.values():
        if isinstance(state, HostError) or state.state not in OVER:
            return None
        worst = worst or (1 if state.code is None else state.code)
    return worst


def note(
    record: RunRecord, state: RunState, code: int | None = None, *, reason: str = "", codes: Mapping[str, int | None]
) -> RunRecord:
    """The record with how the run is now in it; `codes` are exit codes of nodes by their labels.

    Raises:
        InputError: it is not there any more, or cannot be used.
        OutputError: it cannot be written.
    """
    nodes = tuple(replace(node, code=codes.get(node.label, node.code)) for node in record.nodes)
    ended = now_text() if state in ("ended", "failed", "stopped") else None
    return update(record.run_id, state=state, code=code, reason=reason, ended=ended, nodes=nodes)


def note_stop(run_id: str, grace_s: float) -> None:
    """Note that the run is about to be stopped, so that who watches it takes what ends then for no failure.

    `grace_s` is from SIGTERM to SIGKILL. A disk that is full keeps nobody from stopping.
    """
    with contextlib.suppress(InputError):
        known = load(run_id)
        if not known.is_over and known.stop_asked is None:
            update(run_id, stop_asked=now_text(), stop_grace_s=grace_s)


def stopped_with_grace_s(run_id: str, before_s: float) -> float | None:
    """The grace of who had asked to stop the run before a moment of `time.monotonic`; None where nobody had."""
    try:
        known = load(run_id)
    except InputError:
        return None
    moment = time.time() - time.monotonic() + before_s
    if known.stop_asked is None or datetime.fromisoformat(known.stop_asked).timestamp() > moment:
        return None
    return known.stop_grace_s


def noted(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> RunRecord:
    """The record, where all its nodes have ended with that noted in it: the client that started it may be gone.

    Raises:
        InputError, OutputError: as `note`.
    """
    code = exit_code(states)
    if record.is_over or code is None or len(states) < len(record.nodes):
        return record
    over: RunState = "ended" if code == 0 else "stopped" if record.stop_asked else "failed"
    codes = {label: state.code for label, state in states.items() if isinstance(state, NodeState)}
    return note(record, over, code, codes=codes)
