"""The output of `topoplan launch` and `topoplan runs attach`: events, how the run ended, and what failed first."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from topoplan.errors import HostError
from topoplan.report.text import counted
from topoplan.run.events import Event
from topoplan.run.failure import Failure
from topoplan.run.session import Outcome

LAUNCH = "topoplan.launch/1"
ATTACH = "topoplan.attach/1"

OUTPUT = ("bar", "output")
"""Kinds of events that hold the job's own output."""


def event_to_json(event: Event, schema: str) -> str:
    """Return an event as a line of `--json`; output becomes one line of JSON per line."""
    head = {"schema": schema, "event": event.kind, "node": event.node or None}
    if event.kind != "output":
        return json.dumps({**head, "text": event.text, **event.data})
    start = json.dumps({**head, "event": "line"})[:-1]
    return "\n".join(f'{start}, "text": {json.dumps(line)}}}' for line in event.text.split("\n"))


def event_text(event: Event) -> str:
    """Format an event as text: one line, or for output, one line per line of output."""
    if event.kind in OUTPUT:
        mark = f"[{event.node}] "
        return mark + event.text.replace("\n", f"\n{mark}")
    return f"topoplan: {event.node}: {event.text}" if event.node else f"topoplan: {event.text}"


def outcome_to_dict(outcome: Outcome, schema: str) -> dict[str, Any]:
    """Return the last object of `--json`."""
    return {
        "schema": schema,
        "event": "end",
        "end": outcome.end,
        "code": outcome.code,
        "run": outcome.run or None,
        "failure": failure_to_dict(outcome.failure) if outcome.failure is not None else None,
        "errors": {node: error_to_dict(error) for node, error in outcome.errors.items()},
        "running": list(outcome.running),
        "attempts": [asdict(attempt) for attempt in outcome.attempts],
        "lost_steps": outcome.lost_steps,
    }


def launch_lines(outcome: Outcome) -> Iterator[str]:
    """Describe how a launch ended, and what to do."""
    run = shlex.quote(outcome.run)
    yield from _attempts(outcome)
    if outcome.failure is not None:
        yield from failure_lines(outcome.failure)
        if not outcome.running:
            yield "topoplan: the others were stopped, and nothing of the run is left running"
    elif outcome.end == "ended":
        if outcome.stepless:
            yield "topoplan: no step of a training was seen: was there nothing left to do, or no data?"
        yield f"topoplan: run {outcome.run} has ended well"
    elif outcome.end == "stopped":
        yield f"topoplan: run {outcome.run} {'is being' if outcome.running else 'was'} stopped"
    elif outcome.end == "detached":
        yield f"topoplan: run {outcome.run} goes on without this terminal"
        yield from _next(run, "status", "logs -f", "attach", "stop")
    elif outcome.end == "left":
        yield from _next(run, "status", "attach", "stop")
        yield f"topoplan: ended by a signal; run {outcome.run} goes on on its hosts (--stop-on-exit takes it along)"
    elif outcome.end == "interrupted":
        yield "topoplan: stopped" if outcome.run and not outcome.running else "topoplan: interrupted"
    elif outcome.end == "unknown":
        why = next(iter(outcome.errors.values()), "")
        yield f"topoplan: all hosts were unreachable for too long ({why}); the run may still be going on there"
        yield from _next(run, "status", "attach", "stop")
        return
    elif outcome.run:
        yield "topoplan: nothing was started, and what was put on the hosts is removed again"
    else:
        yield "topoplan: nothing was put on any host"
    if outcome.running:
        for node in outcome.running:
            yield f"topoplan: {node} could not be stopped, and may run on: {outcome.errors[node]}"
        yield from _next(run, "stop")


def _attempts(outcome: Outcome) -> Iterator[str]:
    if not outcome.attempts:
        return
    lost = f"{counted(outcome.lost_steps, 'step')} had to be done again" if outcome.lost_steps else "no step was lost"
    yield f"topoplan: run {outcome.run} was started {counted(len(outcome.attempts) + 1, 'time')}; {lost}"
    for number, attempt in enumerate(outcome.attempts, 1):
        step = "" if attempt.last_step is None else f", at step {attempt.last_step}"
        yield f"  {number}: {attempt.reason} ({attempt.host}){step}"
    hosts = Counter(attempt.host for attempt in outcome.attempts)
    if outcome.failure is not None:
        hosts[outcome.failure.host] += 1
    for host, times in hosts.items():
        if times > 1:
            yield f"topoplan: {host} failed first {times} times: see to its machine, or leave it out of the spec"


def attach_lines(outcome: Outcome) -> Iterator[str]:
    """Describe how `attach` ended, and what to do."""
    run = shlex.quote(outcome.run)
    if outcome.end == "left":
        yield from _next(run, "attach", "stop")
        yield "topoplan: left; the run goes on"
        return
    if outcome.end == "stopped":
        yield f"topoplan: run {outcome.run} {'is being' if outcome.running else 'was'} stopped"
        if not outcome.running:
            return
    if outcome.end == "ended":
        yield f"topoplan: run {outcome.run} has ended well"
        return
    if outcome.failure is not None:
        yield from failure_lines(outcome.failure)
    if not outcome.running:
        yield "topoplan: nothing of the run is left running"
        return
    unknown = [node for node in outcome.running if node in outcome.errors]
    running = [node for node in outcome.running if node not in outcome.errors]
    for node in unknown:
        yield f"topoplan: how {node} is, is not known: {outcome.errors[node]}"
    if running:
        still = "still run" if len(running) > 1 else "still runs"
        why = "" if outcome.end == "stopped" else ", though the run cannot succeed any more"
        yield f"topoplan: {', '.join(running)} {still}{why}"
    yield from _next(run, "status", "attach", "stop")


_DOES = {
    "status": "ask how it is",
    "logs -f": "follow its output",
    "attach": "watch it again",
    "stop": "end what is left",
}


def _next(run: str, *verbs: str) -> Iterator[str]:
    width = max(map(len, verbs)) + len(run)
    for verb in verbs:
        typed = f"{verb} {run}"
        yield f"  topoplan runs {typed:{width + 1}}  # {_DOES[verb]}"


_TAIL_LINES = 20


def failure_lines(failure: Failure) -> Iterator[str]:
    """Format a failure as text lines."""
    diagnosis = failure.diagnosis
    rank = f", rank {diagnosis.rank}" if diagnosis is not None and diagnosis.rank is not None else ""
    yield f"topoplan: {failure.node} ({failure.host}){rank} failed first: {failure.what}"
    if failure.tail:
        yield "  its last lines:"
        yield from (f"    {line}" for line in failure.tail[-_TAIL_LINES:])
    if failure.stacks:
        yield "  where the ranks were:"
        yield from (f"    {line}" for line in failure.stacks)
    if diagnosis is not None:
        sure = "" if diagnosis.certain else ", though it may be the consequence of something else"
        yield f"  likely cause: {diagnosis.cause}{sure}"
        if diagnosis.remedy:
            yield f"  what to do: {diagnosis.remedy}"
    if failure.log is not None:
        yield f"  whole logs: {failure.log.parent}"


def failure_to_dict(failure: Failure) -> dict[str, Any]:
    """Return a failure as JSON."""
    diagnosis = failure.diagnosis
    return {
        "node": failure.node,
        "host": failure.host,
        "what": failure.what,
        "code": failure.code,
        **{key: getattr(diagnosis, key, None) for key in ("rank", "kind", "cause", "remedy")},
        "evidence": list(diagnosis.evidence) if diagnosis else [],
        "lines": list(failure.tail[-_TAIL_LINES:]),
        "stacks": list(failure.stacks),
    }


def error_to_dict(error: HostError) -> dict[str, Any]:
    """Return the error of a host as JSON."""
    return {"host": error.host, "problem": error.problem, "what": error.what, "remedy": error.remedy}
