"""The result of stopping a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from topoplan.errors import HostError
from topoplan.report.status import signal_words
from topoplan.report.tables import paragraph, table_of
from topoplan.run.node import Stopped, directory_problem, suspect_remedy, suspect_text
from topoplan.run.reachability import looks_offline
from topoplan.run.record import RunRecord

SCHEMA = "topoplan.stop/1"


def stop_to_dict(record: RunRecord, results: Mapping[str, Stopped | HostError]) -> dict[str, Any]:
    """Return the result as `topoplan.stop/1`."""
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
        "stopped": result.is_over,
        "was_running": result.was_running,
        "left": list(result.left),
        "code": result.code,
        "may_be": [dataclasses.asdict(one) for one in result.suspects],
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
        table.add_row(node.label, node.name, _words(results[node.label]))
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


def _words(result: Stopped | HostError) -> str:
    if isinstance(result, HostError):
        return "; ".join(part for part in (f"unknown: {result.what}", result.remedy) if part)
    if result.left:
        return f"still there after SIGKILL: {', '.join(map(str, result.left))}; see `ps -o pid,user,stat,args`"
    if not result.was_running:
        said = "nothing was running"
    else:
        said = "stopped" if result.code is None else f"stopped, exit code {result.code}{signal_words(result.code)}"
    parts = [said, directory_problem(result.directory)]
    if result.suspects:
        suspects = "; ".join(map(suspect_text, result.suspects))
        parts += [f"may belong to the run: {suspects}", suspect_remedy(result.suspects)]
    if result.gpus_unseen:
        parts.append("nvidia-smi does not say who holds the GPUs")
    return "; ".join(filter(None, parts))
