"""List the runs started from this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from topoplan.report.status import size
from topoplan.report.tables import bullets, paragraph, table_of
from topoplan.report.text import counted, significant
from topoplan.run.record import RunRecord, Unreadable, to_dict
from topoplan.units import GIB

SCHEMA = "topoplan.runs/1"
PRUNED = "topoplan.pruned/1"


def runs_to_dict(runs: Sequence[RunRecord | Unreadable]) -> dict[str, Any]:
    """Return the records as `topoplan.runs/1`, oldest first."""
    return {
        "schema": SCHEMA,
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
    """Return the ids of deleted records as `topoplan.pruned/1`."""
    return {"schema": PRUNED, "runs": [run.run_id for run in gone], "freed_bytes": freed_bytes}


def print_pruned(console: Console, gone: Sequence[RunRecord], freed_bytes: int) -> None:
    """Print the runs whose records were deleted."""
    if not gone:
        paragraph(console, "No run is known to have ended as long ago.")
        return
    paragraph(console, f"{counted(len(gone), 'run')} forgotten, {size(freed_bytes)} freed here; the hosts keep theirs:")
    bullets(console, [run.run_id for run in gone])


def print_measured(console: Console, runs: Sequence[RunRecord | Unreadable]) -> None:
    """Print each run's measured time and memory next to the prediction, oldest first."""
    found = [(run, run.measurement) for run in runs if isinstance(run, RunRecord) and run.measurement is not None]
    if not found:
        paragraph(
            console, "No run has a measurement yet: one that `launch` or `runs attach` sees to its end leaves it."
        )
        return
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
