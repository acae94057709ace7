"""The runs that were started from this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.report.tables import bullets, paragraph, table_of
from topoplan.run.record import RunRecord, Unreadable, to_dict

SCHEMA = "topoplan.runs/1"


def runs_to_dict(runs: Sequence[RunRecord | Unreadable]) -> dict[str, Any]:
    """The form `topoplan.runs/1`: the records, the oldest first."""
    return {
        "schema": SCHEMA,
        "runs": [{**to_dict(run), "directory": str(run.directory())} for run in runs if isinstance(run, RunRecord)],
        "unreadable": [{"run_id": run.run_id, "error": run.why} for run in runs if isinstance(run, Unreadable)],
    }


def print_runs(console: Console, runs: Sequence[RunRecord | Unreadable]) -> None:
    """A row a run, the oldest first; then what cannot be read."""
    good = [run for run in runs if isinstance(run, RunRecord)]
    bad = [run for run in runs if isinstance(run, Unreadable)]
    if not runs:
        paragraph(console, "No runs were started from this machine by this user.")
    if good:
        table = table_of("run", "made (UTC)", right=("nodes",), last=("last seen", "hosts"))
        for run in good:
            code = "" if run.code is None else f", exit code {run.code}"
            table.add_row(
                Text(run.run_id),
                Text(run.created[:16].replace("T", " ")),
                str(len(run.nodes)),
                Text(f"{run.state}{code}"),
                Text(_hosts(run)),
            )
        console.print(table)
    bullets(console, [f"{run.run_id}: {run.trouble}" for run in good if run.trouble])
    bullets(console, [f"{run.run_id}: {run.why}" for run in bad])


def _hosts(run: RunRecord) -> str:
    names = [node.name for node in run.nodes]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
