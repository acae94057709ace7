"""The output of `topoplan launch --dry-run`: every file that would be put on a host, and every command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.hosts.collect import COLLECT, VERSIONS, collect_arguments
from topoplan.hosts.needs import RunNeeds, python_on
from topoplan.hosts.preflight import connections
from topoplan.hosts.preflight.preflight import collect_request
from topoplan.remote import upload
from topoplan.remote.connection import SHELL
from topoplan.remote.ssh_config import Target
from topoplan.report.session import LAUNCH
from topoplan.report.text import counted
from topoplan.run import programs
from topoplan.run.bundle_reader import Bundle, BundleNode
from topoplan.run.launch import runs_directory_on
from topoplan.run.node import SETTLE_S
from topoplan.run.secrets import missing
from topoplan.run.settings import Settings

_RUN = "<run id>-<random>"
_STAGING = ".topoplan-<random>"
_IDENTITY = "PID START BOOT"
"""Identity that `start` reports and later commands pass back."""
_MEET = ("PORTS", "TASK", "PYTHON")


def _programs(checked: bool) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, description, arguments and text of every program that may run on a host, in order of execution."""
    if checked:
        yield "ask", "says what the host is; its words are what is wanted", "WANTED", COLLECT
        yield "versions", "the VERSIONS of `ask`, in Python", "", VERSIONS
        meets = "listens on ports, and connects to those of all other hosts"
        yield "meet", meets, " ".join(_MEET), connections.SCRIPT
        yield "ports", "the PORTS of `meet`, in Python", "TASK", connections.PROGRAM
    puts = "makes a directory, unpacks the files into it, compares them with their SUMS, and renames it"
    yield "put", puts, "WORKDIR DIRECTORY STAGING SECONDS SUMS", upload.PUT
    starts = "compares the files with their SUMS, and starts `keep` in a session of its own"
    yield "start", starts, "DIRECTORY SCRIPT RUN KEEP SUMS PYTHON", programs.START
    keeps = "records itself, runs the script of the node beside `supervise`, and notes its exit code"
    yield "keep", keeps, "SCRIPT RUN PYTHON", programs.LEADER
    hears = "hears of other nodes that fail, and starts `stop` where nobody does, in Python"
    yield "supervise", hears, _IDENTITY, programs.SUPERVISE
    yield "follow", "prints the log as it grows", "DIRECTORY WHERE", programs.FOLLOW
    yield "state", "says how the job is", f"DIRECTORY RUN {_IDENTITY}", programs.STATE
    ends = "ends the job; after a failure and Ctrl-C only, by us or by `supervise`"
    yield "stop", ends, f"DIRECTORY RUN GRACE SETTLE {_IDENTITY}", programs.STOP


def dry_run_to_dict(
    bundle: Bundle, targets: Mapping[str, Target], *, checks: RunNeeds | None, grace_s: float
) -> dict[str, Any]:
    """Return every file and command. `checks` are the needs that hosts are checked for; None skips the checks."""
    secrets = bundle.draft.spec.cluster.secrets
    lacking = missing(secrets)
    return {
        "schema": LAUNCH,
        "event": "dry-run",
        "run": bundle.run,
        "bundle": str(bundle.directory),
        "notes": list(bundle.notes),
        "secrets": [{"name": name, "set": name not in lacking} for name in secrets],
        "preflight": checks is not None,
        "programs": [
            {"name": name, "does": does, "words": words.split(), "text": text}
            for name, does, words, text in _programs(checks is not None)
        ],
        "nodes": [_node(bundle, node, targets[node.name], checks, grace_s) for node in bundle.nodes],
    }


def _node(bundle: Bundle, node: BundleNode, target: Target, checks: RunNeeds | None, grace_s: float) -> dict[str, Any]:
    """Return the files and commands of a host; `commands` are program names with their arguments."""
    asked = collect_arguments(collect_request(bundle.draft.spec.cluster, node.host, checks))
    ask = ["ask", *("VERSIONS" if word == VERSIONS else word for word in asked)]
    workdir, own = node.host.workdir or "~", f"{runs_directory_on(target)}/{node.name}"
    directory = f"{workdir}/{own}/{_RUN}"
    seconds = upload.waiting_s(Settings().upload_s)
    identity = _IDENTITY.split()
    return {
        "node": node.name,
        "ssh": _ssh(target),
        "directory": directory,
        "staging": f"{workdir}/{own}/{_STAGING}",
        "files": {name: len(data) for name, data in bundle.files_of(node).items()},
        "put": upload.PUT,
        "commands": [
            *([ask, ["meet", *_MEET]] if checks is not None else []),
            ["put", workdir, f"{own}/{_RUN}", _STAGING, seconds, "SUMS"],
            ["start", directory, node.script, _RUN, "KEEP", "SUMS", python_on(node.host) or "''"],
            ["follow", directory, "-c+1"],
            ["state", directory, _RUN, *identity],
            ["stop", directory, _RUN, str(round(100 * grace_s)), str(round(100 * SETTLE_S)), *identity],
        ],
        "command": f"cd {directory} && setsid bash -- {shlex.quote(node.script)}",
    }


def dry_run_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Format the dry run as text. The per-host part comes last, where a terminal shows it."""
    yield f"Would launch {document['run']} on {counted(len(document['nodes']), 'host')}; nothing is touched now."
    yield ""
    yield f"PROGRAMS, which run on hosts in `{SHELL}`, with their words and text as standard input:"
    for program in document["programs"]:
        yield ""
        yield f"{' '.join([program['name'], *program['words']])}: {program['does']}"
        yield from (f"    {line}".rstrip() for line in program["text"].splitlines())
    yield ""
    yield "HOSTS, with their files and commands:"
    for node in document["nodes"]:
        yield ""
        yield f"{node['node']}: {node['ssh']}"
        for name, *words in node["commands"]:
            if name == "put":
                for file, size in node["files"].items():
                    yield f"  put {node['directory']}/{file} ({size:,} bytes)"
            yield f"  run {' '.join([name, *words])}"
            if name == "start":
                yield f"      that is {node['command']}"
    yield ""
    for note in document["notes"]:
        yield f"Mind: {note}"
    for secret in document["secrets"]:
        here = "set here" if secret["set"] else "NOT SET here, and a launch is refused"
        yield (
            f"Secret {secret['name']}: {here}; its value goes to `start` by standard input, into no file, and is never"
            " shown."
        )
    yield f"Checks of all hosts first: {'yes' if document['preflight'] else 'no'}. {_RUN} is made at the start."
    yield "Files go to `put` as a tar stream, into a directory beside the run's, which becomes the run's once their"
    yield "SHA-256 is right."
    yield "Started together, each in a session of its own (setsid), which outlives the connection. Kept on the host:"
    yield "  .topoplan/started.json, .topoplan/log, .topoplan/exit and .topoplan/stopped in each directory."
    yield "Nodes meet at the master port, before the trainer takes it, and hear there of one that fails."
    yield "The first failure, or Ctrl-C, ends all: SIGTERM, after the grace SIGKILL, to what this run started only."


def _ssh(target: Target) -> str:
    jumps = ",".join(_login(jump) for jump in target.jumps)
    words = ["ssh", *(["-J", jumps] if jumps else [])]
    return shlex.join(
        [*words, *(["-p", str(target.port)] if target.port != 22 else []), f"{target.user}@{target.hostname}"]
    )


def _login(target: Target) -> str:
    return f"{target.user}@{target.hostname}" + (f":{target.port}" if target.port != 22 else "")
