"""What the states of all nodes say of their run."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.errors import HostError
from topoplan.launch.node import NodeState, State
from topoplan.launch.record import RunRecord, RunState, now_text, update

_OVER: tuple[State, ...] = ("ended", "gone", "rebooted")


def exit_code(states: Mapping[str, NodeState | HostError]) -> int | None:
    """Of the run: the first code that is not 0, in the order of the nodes; 1 where a job has ended without one.

    None while a job runs or cannot be asked about.
    """
    worst = 0
    for state in states.values():
        if isinstance(state, HostError) or state.state not in _OVER:
            return None
        worst = worst or (1 if state.code is None else state.code)
    return worst


def noted(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> RunRecord:
    """The record, where all its nodes have ended with that noted in it: the client that started it may be gone.

    Raises:
        OutputError: it cannot be written.
    """
    code = exit_code(states)
    if record.is_over or code is None or len(states) < len(record.nodes):
        return record
    over: RunState = "ended" if code == 0 else "failed"
    return update(record.run_id, state=over, code=code, ended=now_text())
