"""What came of stopping a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.errors import HostError
from topoplan.launch.node import Stopped
from topoplan.launch.record import RunRecord
from topoplan.report.paragraphs import paragraph
from topoplan.report.status import signal_words
from topoplan.report.tables import table_of

SCHEMA = "topoplan.stop/1"


def stop_to_dict(record: RunRecord, results: Mapping[str, Stopped | HostError]) -> dict[str, Any]:
    """The form `topoplan.stop/1`."""
    return {
        "schema": SCHEMA,
        "run_id": record.run_id,
        "stopped": is_stopped(results),
        "nodes": [{"node": node.node, "host": node.name, **_node(results[node.label])} for node in record.nodes],
    }


def _node(result: Stopped | HostError) -> dict[str, Any]:
    if isinstance(result, HostError):
        return {"stopped": None, "problem": result.problem, "error": str(result)}
    return {
        "stopped": not result.left,
        "was_running": result.was_running,
        "left": list(result.left),
        "code": result.code,
    }


def is_stopped(results: Mapping[str, Stopped | HostError]) -> bool:
    """Whether it is certain that nothing of the run is left anywhere."""
    return all(isinstance(result, Stopped) and not result.left for result in results.values())


def print_stop(console: Console, record: RunRecord, results: Mapping[str, Stopped | HostError]) -> None:
    """A row a node, and what it comes to."""
    table = table_of("node", "host", last=("",))
    for node in record.nodes:
        table.add_row(Text(node.label), Text(node.name), Text(_words(results[node.label])))
    console.print(table)
    if is_stopped(results):
        paragraph(console, f"{record.run_id}: nothing of it is left running.")
    else:
        again = f"run `topoplan stop {shlex.quote(record.run_id)}` again"
        paragraph(console, f"{record.run_id}: not all of it is known to have ended; {again}.")


def _words(result: Stopped | HostError) -> str:
    if isinstance(result, HostError):
        return "; ".join(part for part in (f"unknown: {result.what}", result.remedy) if part)
    if result.left:
        return f"still there after SIGKILL: {', '.join(map(str, result.left))}; see `ps -o pid,user,stat,args`"
    if not result.was_running:
        return "nothing was running"
    return "stopped" if result.code is None else f"stopped, exit code {result.code}{signal_words(result.code)}"
