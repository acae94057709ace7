"""What `topoplan attach` says at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from topoplan.report import launch
from topoplan.report.failure import error_to_dict, failure_lines, failure_to_dict
from topoplan.run.attach import Attached
from topoplan.run.events import Event

SCHEMA = "topoplan.attach/1"


def event_to_dict(event: Event) -> dict[str, Any]:
    """One line of `--json`."""
    return {**launch.event_to_dict(event), "schema": SCHEMA}


def attached_to_dict(attached: Attached) -> dict[str, Any]:
    """The last line of `--json`."""
    return {
        "schema": SCHEMA,
        "event": "end",
        "end": attached.end,
        "code": attached.code,
        "run": attached.run,
        "failure": failure_to_dict(attached.failure) if attached.failure is not None else None,
        "errors": {node: error_to_dict(error) for node, error in attached.errors.items()},
        "running": list(attached.running),
    }


def attached_lines(attached: Attached) -> Iterator[str]:
    """How it ended, and what there is to do."""
    run = shlex.quote(attached.run)
    if attached.end == "left":
        yield "topoplan: left; the run goes on"
        yield f"  watch it again: topoplan attach {run}    end it: topoplan stop {run}"
        return
    if attached.end == "stopped":
        yield f"topoplan: run {attached.run} {'is being' if attached.running else 'was'} stopped"
        if not attached.running:
            return
    if attached.end == "ended":
        yield f"topoplan: run {attached.run} has ended well"
        return
    if attached.failure is not None:
        yield from failure_lines(attached.failure)
    if not attached.running:
        yield "topoplan: nothing of the run is left running"
        return
    unknown = [node for node in attached.running if node in attached.errors]
    running = [node for node in attached.running if node not in attached.errors]
    for node in unknown:
        yield f"topoplan: how {node} is, is not known: {attached.errors[node]}"
    if running:
        still = "still run" if len(running) > 1 else "still runs"
        why = "" if attached.end == "stopped" else ", though the run cannot succeed any more"
        yield f"topoplan: {', '.join(running)} {still}{why}"
    yield f"  topoplan status {run}    topoplan attach {run}    topoplan stop {run}"
