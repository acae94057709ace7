"""The runs started from this machine: their list, the status of one by node, and the result of stopping one."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from topoplan.errors import HostError
from topoplan.report.tables import bullets, paragraph, table_of
from topoplan.report.text import counted, duration, significant
from topoplan.run.node import NodeState, Stopped, directory_problem, suspect_remedy, suspect_text
from topoplan.run.outcome import run_state
from topoplan.run.reachability import looks_offline
from topoplan.run.record import Measurement, RunRecord, Unreadable, to_dict
from topoplan.units import GIB


def runs_to_dict(runs: Sequence[RunRecord | Unreadable]) -> dict[str, Any]:
    """Return the records, oldest first."""
    return {
        "schema": "topoplan.runs/1",
        "runs": [{**to_dict(run), "directory": str(run.directory())} for run in runs if isinstance(run, RunRecord)],
        "unreadable": [{"run_id": run.run_id, "error": run.why} for run in runs if isinstance(run, Unreadable)],
    }


def print_runs(console: Console, runs: Sequence[RunRecord | Unreadable]) -> None:
    """Print a row per run, oldest first, then the unreadable records."""
    good = [run for run in runs if isinstance(run, RunRecord)]
    bad = [run for run in runs if isinstance(run, Unreadable)]
    if not runs:
        paragraph(console, "No runs were started from this machine by this user.")
    if good:
        table = table_of("run", "made (UTC)", right=("nodes",), last=("last seen", "hosts"))
        for run in good:
            code = "" if run.code is None else f", exit code {run.code}"
            code += f", started {len(run.attempts) + 1} times" if run.attempts else ""
            table.add_row(
                run.run_id, run.created[:16].replace("T", " "), str(len(run.nodes)), f"{run.state}{code}", _hosts(run)
            )
        console.print(table)
        paragraph(
            console, "`runs status`, `logs`, `attach` and `stop` take any part of an id that no other has.", style="dim"
        )
    bullets(console, [f"{run.run_id}: {run.trouble}" for run in good if run.trouble])
    bullets(console, [f"{run.run_id}: {run.why}" for run in bad])


def pruned_to_dict(gone: Sequence[RunRecord], freed_bytes: int) -> dict[str, Any]:
    """Return the ids of deleted records."""
    return {"schema": "topoplan.pruned/1", "runs": [run.run_id for run in gone], "freed_bytes": freed_bytes}


def print_pruned(console: Console, gone: Sequence[RunRecord], freed_bytes: int) -> None:
    """Print the runs whose records were deleted."""
    if not gone:
        paragraph(console, "No run is known to have ended as long ago.")
        return
    paragraph(
        console, f"{counted(len(gone), 'run')} forgotten, {_size(freed_bytes)} freed here; the hosts keep theirs:"
    )
    bullets(console, [run.run_id for run in gone])


def print_measured(
    console: Console, runs: Sequence[RunRecord | Unreadable], why_not: Callable[[RunRecord], str]
) -> None:
    """Print each run's measured time and memory next to the prediction, oldest first, then why others have none."""
    good = [run for run in runs if isinstance(run, RunRecord)]
    found = [(run, run.measurement) for run in good if run.measurement is not None]
    if found:
        _print_measurements(console, found)
    else:
        paragraph(
            console, "No run has a measurement yet: one that `launch` or `runs attach` sees to its end leaves it."
        )
    bullets(console, [f"{run.run_id} has none: {why_not(run)}" for run in good if run.measurement is None])


def _print_measurements(console: Console, found: Sequence[tuple[RunRecord, Measurement]]) -> None:
    table = table_of("run", "plan", right=("steps", "step", "off", "held GiB", "off"), last=("bands",))
    for run, one in found:
        held = [name for name, kept in (("step", one.time_held), ("memory", one.memory_held)) if kept is False]
        gib, off = "-", "-"
        if one.reserved_bytes is not None and one.predicted_reserved_bytes is not None:
            gib = f"{one.reserved_bytes / GIB:.1f}"
            off = f"{100 * (one.predicted_reserved_bytes / one.reserved_bytes - 1):+.0f}%"
        table.add_row(
            run.run_id,
            one.plan,
            str(one.steps),
            f"{significant(one.step_s)} s",
            f"{100 * (one.predicted_step_s / one.step_s - 1):+.0f}%",
            gib,
            off,
            f"{' and '.join(held)} outside" if held else "held",
        )
    console.print(table)
    paragraph(
        console, "off: predicted over measured, less one. `topoplan calibrate --runs` learns from them.", style="dim"
    )


def _hosts(run: RunRecord) -> str:
    names = [node.name for node in run.nodes]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def status_to_dict(record: RunRecord, states: Mapping[str, NodeState | HostError]) -> dict[str, Any]:
    """Return the status. A node that cannot be queried has the state `unreachable`."""
    state, code = run_state(record, states)
    return {
        "schema": "topoplan.status/1",
        "run_id": record.run_id,
        "name": record.name,
        "created": record.created,
        "state": state,
        "code": code,
        "trouble": record.trouble,
        "nodes": [
            {"node": node.node, "host": node.name, "run_dir": node.run_dir, **_state_to_dict(states[node.label])}
            for node in record.nodes
            if node.label in states
        ],
    }


def _state_to_dict(state: NodeState | HostError) -> dict[str, Any]:
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


def print_status(console: Console, record: RunRecord, states: Mapping[str, NodeState | HostError]) -> None:
    """Print the run in a line, then a row per node."""
    created = record.created[:16].replace("T", " ")
    words = {"never-started": "not started on all nodes", "unknown": "not known"}
    state_of_run, code = run_state(record, states)
    over = f"{words.get(state_of_run, state_of_run)}{f' with exit code {code}' if code else ''}"
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
                "-" if state.started is None else _size(state.log_bytes),
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
        return f"ended with exit code {state.code}{_signal_words(state.code)}{why}{left}"
    return {
        "running": "running",
        "gone": "gone without an exit code: it was killed by somebody, for memory, or at logout",
        "never-started": "never started",
        "rebooted": "the machine was started again while it ran",
    }[state.state]


def _signal_words(code: int | None) -> str:
    """Return ` (SIGKILL)` for 137, as in shells; an empty string if the code does not denote a signal."""
    try:
        return f" ({signal.Signals((code or 0) - 128).name})"
    except ValueError:
        return ""


def _size(size_bytes: int) -> str:
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"


def stop_to_dict(record: RunRecord, results: Mapping[str, Stopped | HostError]) -> dict[str, Any]:
    """Return the result of stopping a run."""
    return {
        "schema": "topoplan.stop/1",
        "run_id": record.run_id,
        "stopped": is_stopped(results),
        "nodes": [{"node": node.node, "host": node.name, **_end_to_dict(results[node.label])} for node in record.nodes],
    }


def _end_to_dict(result: Stopped | HostError) -> dict[str, Any]:
    if isinstance(result, HostError):
        return {"stopped": None, "problem": result.problem, "error": str(result)}
    return {
        "stopped": result.is_over,
        "was_running": result.was_running,
        "left": list(result.left),
        "code": result.code,
        "may_be": [asdict(one) for one in result.suspects],
        "directory": result.directory,
        "gpus_unseen": result.gpus_unseen,
    }


def is_stopped(results: Mapping[str, Stopped | HostError]) -> bool:
    """Whether it is certain that no process of the run is left on any host."""
    return all(isinstance(result, Stopped) and result.is_over for result in results.values())


def print_stop(console: Console, record: RunRecord, results: Mapping[str, Stopped | HostError]) -> None:
    """Print a row per node, and a conclusion."""
    table = table_of("node", "host", last=("",))
    for node in record.nodes:
        table.add_row(node.label, node.name, _stopped_words(results[node.label]))
    console.print(table)
    suspects = [result for result in results.values() if isinstance(result, Stopped) and result.suspects]
    if is_stopped(results):
        paragraph(console, f"{record.run_id}: nothing of it is left running.")
    elif len(suspects) == sum(not (isinstance(result, Stopped) and result.is_over) for result in results.values()):
        paragraph(
            console,
            f"{record.run_id}: what is known to belong to it has ended. The processes named here got no signal: they"
            " have left the session, parents and environment that would prove that they belong to it.",
        )
    else:
        again = f"run `topoplan runs stop {shlex.quote(record.run_id)}` again"
        offline = "this machine seems to be offline; " if looks_offline(results) else ""
        paragraph(console, f"{record.run_id}: {offline}not all of it is known to have ended; {again}.")


def _stopped_words(result: Stopped | HostError) -> str:
    if isinstance(result, HostError):
        return "; ".join(part for part in (f"unknown: {result.what}", result.remedy) if part)
    if result.left:
        return f"still there after SIGKILL: {', '.join(map(str, result.left))}; see `ps -o pid,user,stat,args`"
    if not result.was_running:
        said = "nothing was running"
    else:
        said = "stopped" if result.code is None else f"stopped, exit code {result.code}{_signal_words(result.code)}"
    parts = [said, directory_problem(result.directory)]
    if result.suspects:
        suspects = "; ".join(map(suspect_text, result.suspects))
        parts += [f"may belong to the run: {suspects}", suspect_remedy(result.suspects)]
    if result.gpus_unseen:
        parts.append("nvidia-smi does not say who holds the GPUs")
    return "; ".join(filter(None, parts))
