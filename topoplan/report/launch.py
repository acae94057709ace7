"""What `topoplan launch` says: what happens, and how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from topoplan.launch.events import Event
from topoplan.launch.run import Outcome

SCHEMA = "topoplan.launch/1"

_TAIL_LINES = 20
_QUIET = ("bar", "line")


def event_to_dict(event: Event) -> dict[str, Any]:
    """One line of `--json`."""
    return {"schema": SCHEMA, "event": event.kind, "node": event.node or None, "text": event.text, **event.data}


def event_text(event: Event) -> str:
    """One line for a person."""
    if event.kind in _QUIET:
        return f"[{event.node}] {event.text}"
    return f"topoplan: {event.node}: {event.text}" if event.node else f"topoplan: {event.text}"


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """The last line of `--json`."""
    failure = outcome.failure
    diagnosis = failure.diagnosis if failure else None
    return {
        "schema": SCHEMA,
        "event": "end",
        "end": outcome.end,
        "code": outcome.code,
        "run": outcome.run or None,
        "failure": failure
        and {
            "node": failure.node,
            "host": failure.host,
            "what": failure.what,
            "code": failure.code,
            "rank": diagnosis.rank if diagnosis else None,
            "kind": diagnosis.kind if diagnosis else None,
            "cause": diagnosis.cause if diagnosis else None,
            "remedy": diagnosis.remedy if diagnosis else None,
            "evidence": list(diagnosis.evidence) if diagnosis else [],
            "lines": list(failure.tail[-_TAIL_LINES:]),
        },
        "errors": {
            node: {"host": error.host, "problem": error.problem, "what": error.what, "remedy": error.remedy}
            for node, error in outcome.errors.items()
        },
        "running": list(outcome.running),
    }


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """How it ended, and what there is to do."""
    run = shlex.quote(outcome.run)
    if outcome.failure is not None:
        yield from _failure_lines(outcome)
    elif outcome.end == "ended":
        yield f"topoplan: run {outcome.run} has ended well"
    elif outcome.end == "detached":
        yield f"topoplan: run {outcome.run} goes on without this terminal"
        yield f"  topoplan status {run}    topoplan logs -f {run}    topoplan attach {run}    topoplan stop {run}"
    elif outcome.end == "interrupted":
        yield "topoplan: stopped" if outcome.run and not outcome.running else "topoplan: interrupted"
    elif outcome.run:
        yield "topoplan: nothing was started, and what was put on the hosts is removed again"
    else:
        yield "topoplan: nothing was put on any host"
    if outcome.running:
        for node in outcome.running:
            yield f"topoplan: {node} could not be stopped: {outcome.errors[node]}"
        yield f"  finish with: topoplan stop {run}"


def _failure_lines(outcome: Outcome) -> Iterator[str]:
    failure = outcome.failure
    if failure is None:
        return
    diagnosis = failure.diagnosis
    rank = f", rank {diagnosis.rank}" if diagnosis is not None and diagnosis.rank is not None else ""
    yield f"topoplan: {failure.node} ({failure.host}){rank} failed first: {failure.what}"
    if failure.tail:
        yield "  its last lines:"
        yield from (f"    {line}" for line in failure.tail[-_TAIL_LINES:])
    if diagnosis is not None:
        sure = "" if diagnosis.certain else ", though it may be the consequence of something else"
        yield f"  likely cause: {diagnosis.cause}{sure}"
        if diagnosis.remedy:
            yield f"  what to do: {diagnosis.remedy}"
    if failure.log is not None:
        yield f"  whole logs: {failure.log.parent}"
    if not outcome.running:
        yield "topoplan: the others were stopped, and nothing of the run is left running"
