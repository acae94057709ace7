"""The output of `topoplan launch --dry-run`: every file that would be put on a host, and every command.

The text of the programs, 1,500 lines, is in the JSON form alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
        yield "ask", "reports the facts about the host that WANTED lists", "WANTED", COLLECT
        yield "versions", "the VERSIONS argument of `ask`, in Python", "", VERSIONS
        meets = "listens on ports, and connects to the ports of all other hosts"
        yield "meet", meets, " ".join(_MEET), connections.SCRIPT
        yield "ports", "the PORTS argument of `meet`, in Python", "TASK", connections.PROGRAM
    puts = "creates a directory, unpacks the files into it, checks them against SUMS, and renames it"
    yield "put", puts, "WORKDIR DIRECTORY STAGING SECONDS SUMS", upload.PUT
    starts = "checks the files against SUMS, and starts `keep` in a new session"
    yield "start", starts, "DIRECTORY SCRIPT RUN KEEP SUMS PYTHON", programs.START
    keeps = "records itself, runs the node's script next to `supervise`, and records its exit code"
    yield "keep", keeps, "SCRIPT RUN PYTHON", programs.LEADER
    hears = "learns of failures of other nodes, and runs `stop` if the launcher cannot, in Python"
    yield "supervise", hears, _IDENTITY, programs.SUPERVISE
    yield "follow", "prints the log as it grows", "DIRECTORY WHERE", programs.FOLLOW
    yield "state", "reports the state of the job", f"DIRECTORY RUN {_IDENTITY}", programs.STATE
    ends = "ends the job, only after a failure or Ctrl-C; run by the launcher or by `supervise`"
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
        "hosts_known": bundle.has_hosts,
        "programs": [
            {"name": name, "does": does, "words": words.split(), "text": text}
            for name, does, words, text in _programs(checks is not None)
        ],
        "nodes": [_node(bundle, node, targets[node.name], checks, grace_s) for node in bundle.nodes],
    }


def _node(bundle: Bundle, node: BundleNode, target: Target, checks: RunNeeds | None, grace_s: float) -> dict[str, Any]:
    """Return the files and commands of a host; `commands` are program names with their arguments."""
    cluster = replace(bundle.draft.spec.cluster, hosts=tuple(one.host for one in bundle.nodes))
    asked = collect_arguments(collect_request(cluster, node.host, checks))
    ask = ["ask", *("VERSIONS" if word == VERSIONS else word for word in asked)]
    workdir, own = node.host.workdir or "~", f"{runs_directory_on(target)}/{node.name}"
    directory = f"{workdir}/{own}/{_RUN}"
    seconds = upload.waiting_s(Settings().upload_s)
    identity = _IDENTITY.split()
    # Scripts of a plan without hosts are given the address of node 0 when they are started.
    master = "" if bundle.has_hosts or len(bundle.nodes) == 1 else f"MASTER_ADDR={bundle.nodes[0].host.address} "
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
        "command": f"cd {directory} && {master}setsid bash -- {shlex.quote(node.script)}",
    }


def dry_run_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Format the dry run as text. The per-host part comes last, where a terminal shows it."""
    hosts = counted(len(document["nodes"]), "host")
    if document["hosts_known"]:
        yield f"Would launch {document['run']} on {hosts}; nothing is touched now."
    else:
        yield f"Cannot launch {document['run']} yet, because its plan names no hosts."
        yield f"This is what {hosts} would get, with placeholders for their addresses and users."
    yield ""
    yield "PROGRAMS that run on hosts, with their arguments; --json has their text:"
    for program in document["programs"]:
        yield f"  {' '.join([program['name'], *program['words']])}: {program['does']}"
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
                yield f"      which runs {node['command']}"
    yield ""
    for note in document["notes"]:
        yield f"Note: {note}"
    for secret in document["secrets"]:
        here = "set here" if secret["set"] else "NOT SET here, so a launch would be refused"
        yield (
            f"Secret {secret['name']}: {here}; its value is passed to `start` on standard input, never stored in a file"
            " and never shown."
        )
    yield f"Programs are passed on standard input to `{SHELL}`."
    yield f"Preflight checks of all hosts first: {'yes' if document['preflight'] else 'no'}."
    yield f"{_RUN} is chosen at launch."
    yield "Files are sent to `put` as a tar stream, into a staging directory that is renamed once their SHA-256 match."
    yield "All nodes start together, each in a session of its own (setsid), which outlives the connection."
    yield "Each directory keeps .topoplan/started.json, .topoplan/log, .topoplan/exit and .topoplan/stopped."
    yield "Nodes rendezvous at the master port before the trainer uses it, and learn there if another node fails."
    yield "The first failure, or Ctrl-C, stops the processes of this run on all nodes, and no others:"
    yield "SIGTERM, and SIGKILL after the grace period."


def _ssh(target: Target) -> str:
    jumps = ",".join(_login(jump) for jump in target.jumps)
    words = ["ssh", *(["-J", jumps] if jumps else [])]
    return shlex.join(
        [*words, *(["-p", str(target.port)] if target.port != 22 else []), f"{target.user}@{target.hostname}"]
    )


def _login(target: Target) -> str:
    return f"{target.user}@{target.hostname}" + (f":{target.port}" if target.port != 22 else "")
