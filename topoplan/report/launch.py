"""What `topoplan launch` says: its plan without doing it, what happens, and how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.launch.bundle_reader import Bundle
from topoplan.launch.events import Event
from topoplan.launch.run import RUNS_DIRECTORY, Outcome
from topoplan.launch.ssh_config import Target

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


# --dry-run -----------------------------------------------------------------------------------------------------------


def dry_run_to_dict(bundle: Bundle, targets: Mapping[str, Target], *, preflight: bool) -> dict[str, Any]:
    """Every file and command, as JSON."""
    return {
        "schema": SCHEMA,
        "event": "dry-run",
        "run": bundle.run,
        "bundle": str(bundle.directory),
        "notes": list(bundle.notes),
        "preflight": preflight,
        "nodes": [
            {
                "node": node.name,
                "ssh": _ssh(targets[node.name]),
                "directory": _directory(node.name, node.host.workdir),
                "files": {name: len(data) for name, data in bundle.files_of(node).items()},
                "command": _command(node.name, node.host.workdir, node.script),
            }
            for node in bundle.nodes
        ],
    }


def dry_run_lines(bundle: Bundle, targets: Mapping[str, Target], *, preflight: bool) -> Iterator[str]:
    """Every file and command, for a person."""
    yield f"Would launch {bundle.run} on {len(bundle.nodes)} hosts; nothing is touched now."
    for note in bundle.notes:
        yield f"Mind: {note}"
    yield f"Checks of all hosts first: {'yes' if preflight else 'no'}. <run id> is made at the start."
    for node in bundle.nodes:
        directory = _directory(node.name, node.host.workdir)
        yield ""
        yield f"{node.name}: {_ssh(targets[node.name])}"
        for name, data in bundle.files_of(node).items():
            yield f"  put {directory}/{name} ({len(data):,} bytes)"
        yield f"  run {_command(node.name, node.host.workdir, node.script)}"
    yield ""
    yield "Started together, each in a session of its own (setsid), which outlives the connection. Kept on the host:"
    yield "  .topoplan/started.json, .topoplan/log and .topoplan/exit in each directory."
    yield "The first failure, or Ctrl-C, ends all: SIGTERM, after the grace SIGKILL, to what this run started only."


def _directory(name: str, workdir: str | None) -> str:
    return f"{workdir or '~'}/{RUNS_DIRECTORY}/{name}/<run id>"


def _command(name: str, workdir: str | None, script: str) -> str:
    return f"cd {_directory(name, workdir)} && setsid bash -- {shlex.quote(script)}"


def _ssh(target: Target) -> str:
    jumps = ",".join(_login(jump) for jump in target.jumps)
    words = ["ssh", *(["-J", jumps] if jumps else [])]
    return shlex.join(
        [*words, *(["-p", str(target.port)] if target.port != 22 else []), f"{target.user}@{target.hostname}"]
    )


def _login(target: Target) -> str:
    return f"{target.user}@{target.hostname}" + (f":{target.port}" if target.port != 22 else "")
