"""The status of a run, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from topoplan.errors import HostError
from topoplan.report.tables import paragraph, table_of
from topoplan.report.text import counted, duration
from topoplan.run.node import NodeState, directory_problem
from topoplan.run.outcome import exit_code
from topoplan.run.reachability import looks_offline
from topoplan.run.record import RunRecord

SCHEMA = "topoplan.status/1"


def status_to_dict(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> dict[str, Any]:
    """Return the status as `topoplan.status/1`. A node that cannot be queried has the state `unreachable`."""
    return {
        "schema": SCHEMA,
        "run_id": record.run_id,
        "name": record.name,
        "created": record.created,
        "state": _run_state(states),
        "code": exit_code(states),
        "trouble": record.trouble,
        "nodes": [
            {"node": node.node, "host": node.name, "run_dir": node.run_dir, **_node(states[node.label])}
            for node in record.nodes
            if node.label in states
        ],
    }


def _node(state: NodeState | HostError) -> dict[str, Any]:
    if isinstance(state, HostError):
        return {"state": "unreachable", "problem": state.problem, "error": str(state)}
    return {
        "state": state.state,
        "code": state.code,
        "started_unix_s": state.started.unix_s if state.started else None,
        "elapsed_s": state.elapsed_s,
        "log_bytes": state.log_bytes,
        "pids": list(state.pids),
        "directory": state.directory,
        "stopped": state.stopped or None,
    }


def _run_state(states: Mapping[str, NodeState | HostError]) -> str:
    found = {"unreachable" if isinstance(state, HostError) else state.state for state in states.values()}
    if "running" in found:
        return "running"
    if "unreachable" in found:
        return "unknown"
    code = exit_code(states)
    if code is None:
        return "never-started"
    return "failed" if code else "ended"


def print_status(console: Console, record: RunRecord, states: Mapping[str, NodeState | HostError]) -> None:
    """Print the run in a line, then a row per node."""
    created = record.created[:16].replace("T", " ")
    words = {"never-started": "not started on all nodes", "unknown": "not known"}
    run_state = _run_state(states)
    code = exit_code(states)
    over = f"{words.get(run_state, run_state)}{f' with exit code {code}' if code else ''}"
    over += ", this machine seems to be offline" if looks_offline(states) else ""
    paragraph(console, f"{record.run_id}: {over}; made {created} UTC, {counted(len(record.nodes), 'node')}")
    if record.trouble:
        paragraph(console, f"On this machine: {record.trouble}.")
    table = table_of("node", "host", right=("for", "log", "processes"), last=("state",))
    for node in record.nodes:
        if node.label not in states:
            continue
        state = states[node.label]
        if isinstance(state, HostError):
            error = "; ".join(part for part in (state.what, state.remedy) if part)
            table.add_row(node.label, node.name, "-", "-", "-", f"unreachable: {error}")
        else:
            table.add_row(
                node.label,
                node.name,
                "-" if state.elapsed_s is None else duration(state.elapsed_s),
                "-" if state.started is None else size(state.log_bytes),
                str(len(state.pids)) if state.pids else "-",
                node_words(state),
            )
    console.print(table)


def node_words(state: NodeState) -> str:
    """Describe the state of a node in one phrase."""
    if state.state == "gone" and state.is_unreadable:
        return f"gone, and how it ended is not known: {directory_problem(state.directory)}"
    if state.state == "never-started" and state.directory == "gone":
        return "never started, or its run directory was deleted"
    return "; ".join(filter(None, (_state_words(state), directory_problem(state.directory))))


def _state_words(state: NodeState) -> str:
    if state.state == "ended":
        left = f"; left {counted(len(state.pids), 'process', 'processes')} running" if state.pids else ""
        why = f" on its host's own account, as {state.stopped}" if state.stopped else ""
        return f"ended with exit code {state.code}{signal_words(state.code)}{why}{left}"
    return {
        "running": "running",
        "gone": "gone without an exit code: it was killed by somebody, for memory, or at logout",
        "never-started": "never started",
        "rebooted": "the machine was started again while it ran",
    }[state.state]


def signal_words(code: int | None) -> str:
    """Return ` (SIGKILL)` for 137, as in shells; an empty string if the code does not denote a signal."""
    import signal

    try:
        return f" ({signal.Signals((code or 0) - 128).name})"
    except ValueError:
        return ""


def size(size_bytes: int) -> str:
    """Format a size: 512 B, 3.2 KiB, 200 MiB."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
