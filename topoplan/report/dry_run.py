"""What `topoplan launch --dry-run` says: every file that would be put on a host, and every command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topoplan.hosts.collect import COLLECT, VERSIONS, collect_words
from topoplan.hosts.needs import RunNeeds, python_on
from topoplan.hosts.preflight import connections
from topoplan.hosts.preflight.preflight import wanted
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
"""What the host says at the start, and is told again."""
_MEET = ("PORTS", "TASK", "PYTHON")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The text of a command, and what it is given."""

    name: str
    does: str
    words: str
    """Its words, as a reader knows them."""
    text: str


def _programs(bundle: Bundle, checks: RunNeeds | None) -> tuple[_Program, ...]:
    """All that may run on a host, in the order in which it does. Those of node 0, where they differ."""
    ask = _Program(
        name="ask",
        does="says what the host is; its words are what is wanted",
        words="WANTED",
        text=COLLECT,
    )
    versions = _Program(name="versions", does="the VERSIONS of `ask`, in Python", words="", text=VERSIONS)
    meet = _Program(
        name="meet",
        does="listens on ports, and connects to those of all other hosts",
        words=" ".join(_MEET),
        text=connections.SCRIPT,
    )
    ports = _Program(name="ports", does="the PORTS of `meet`, in Python", words="TASK", text=connections.PROGRAM)
    return (
        *((ask, versions, meet, ports) if checks is not None else ()),
        _Program(
            name="put",
            does="makes a directory, unpacks the files into it, compares them with their SUMS, and renames it",
            words="WORKDIR DIRECTORY STAGING SECONDS SUMS",
            text=upload.PUT,
        ),
        _Program(
            name="start",
            does="compares the files with their SUMS, and starts `keep` in a session of its own",
            words="DIRECTORY SCRIPT RUN KEEP SUMS PYTHON",
            text=programs.START,
        ),
        _Program(
            name="keep",
            does="records itself, runs the script of the node beside `supervise`, and notes its exit code",
            words="SCRIPT RUN PYTHON",
            text=programs.KEEPER,
        ),
        _Program(
            name="supervise",
            does="hears of other nodes that fail, and starts `stop` where nobody does, in Python",
            words="PID START BOOT",
            text=programs.SUPERVISE,
        ),
        _Program(name="follow", does="prints the log as it grows", words="DIRECTORY WHERE", text=programs.FOLLOW),
        _Program(name="state", does="says how the job is", words=f"DIRECTORY RUN {_IDENTITY}", text=programs.STATE),
        _Program(
            name="stop",
            does="ends the job; after a failure and Ctrl-C only, by us or by `supervise`",
            words=f"DIRECTORY RUN GRACE SETTLE {_IDENTITY}",
            text=programs.STOP,
        ),
    )


def dry_run_to_dict(
    bundle: Bundle, targets: Mapping[str, Target], *, checks: RunNeeds | None, grace_s: float
) -> dict[str, Any]:
    """Every file and command, as JSON. `checks` are the needs that hosts are checked for, None for no checks."""
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
            {"name": one.name, "does": one.does, "words": one.words.split(), "text": one.text}
            for one in _programs(bundle, checks)
        ],
        "nodes": [
            {
                "node": node.name,
                "ssh": _ssh(targets[node.name]),
                "directory": _directory(node, targets[node.name]),
                "staging": _staging(node, targets[node.name]),
                "files": {name: len(data) for name, data in bundle.files_of(node).items()},
                "put": upload.PUT,
                "commands": _commands(bundle, node, targets[node.name], checks, grace_s),
                "command": _command(node, targets[node.name]),
            }
            for node in bundle.nodes
        ],
    }


def dry_run_lines(
    bundle: Bundle, targets: Mapping[str, Target], *, checks: RunNeeds | None, grace_s: float
) -> Iterator[str]:
    """Every file and command, for a person. What there is for each host comes last, where a terminal shows it."""
    yield f"Would launch {bundle.run} on {counted(len(bundle.nodes), 'host')}; nothing is touched now."
    yield ""
    yield f"PROGRAMS, which run on hosts in `{SHELL}`, with their words and text as standard input:"
    for program in _programs(bundle, checks):
        yield ""
        yield f"{' '.join([program.name, program.words]).strip()}: {program.does}"
        yield from (f"    {line}".rstrip() for line in program.text.splitlines())
    yield ""
    yield "HOSTS, with their files and commands:"
    for node in bundle.nodes:
        directory = _directory(node, targets[node.name])
        yield ""
        yield f"{node.name}: {_ssh(targets[node.name])}"
        for name, *words in _commands(bundle, node, targets[node.name], checks, grace_s):
            if name == "put":
                for file, data in bundle.files_of(node).items():
                    yield f"  put {directory}/{file} ({len(data):,} bytes)"
            yield f"  run {' '.join([name, *words])}"
            if name == "start":
                yield f"      that is {_command(node, targets[node.name])}"
    yield ""
    for note in bundle.notes:
        yield f"Mind: {note}"
    secrets = bundle.draft.spec.cluster.secrets
    lacking = missing(secrets)
    for name in secrets:
        here = "NOT SET here, and a launch is refused" if name in lacking else "set here"
        yield f"Secret {name}: {here}; its value goes to `start` by standard input, into no file, and is never shown."
    yield f"Checks of all hosts first: {'yes' if checks is not None else 'no'}. {_RUN} is made at the start."
    yield "Files go to `put` as a tar stream, into a directory beside the run's, which becomes the run's once their"
    yield "SHA-256 is right."
    yield "Started together, each in a session of its own (setsid), which outlives the connection. Kept on the host:"
    yield "  .topoplan/started.json, .topoplan/log, .topoplan/exit and .topoplan/stopped in each directory."
    yield "Nodes meet at the master port, before the trainer takes it, and hear there of one that fails."
    yield "The first failure, or Ctrl-C, ends all: SIGTERM, after the grace SIGKILL, to what this run started only."


def _commands(
    bundle: Bundle, node: BundleNode, target: Target, checks: RunNeeds | None, grace_s: float
) -> list[list[str]]:
    """Names of programs, with the words that they are given."""
    asked = collect_words(wanted(bundle.draft.spec.cluster, node.host, checks))
    ask = ["ask", *("VERSIONS" if word == VERSIONS else word for word in asked)]
    directory = _directory(node, target)
    seconds = upload.waiting_s(Settings().upload_s)
    identity = _IDENTITY.split()
    return [
        *([ask, ["meet", *_MEET]] if checks is not None else []),
        ["put", node.host.workdir or "~", f"{_own(node, target)}/{_RUN}", _STAGING, seconds, "SUMS"],
        ["start", directory, node.script, _RUN, "KEEP", "SUMS", python_on(node.host) or "''"],
        ["follow", directory, "-c+1"],
        ["state", directory, _RUN, *identity],
        ["stop", directory, _RUN, str(round(100 * grace_s)), str(round(100 * SETTLE_S)), *identity],
    ]


def _directory(node: BundleNode, target: Target) -> str:
    return f"{_parent(node, target)}/{_RUN}"


def _staging(node: BundleNode, target: Target) -> str:
    return f"{_parent(node, target)}/{_STAGING}"


def _parent(node: BundleNode, target: Target) -> str:
    return f"{node.host.workdir or '~'}/{_own(node, target)}"


def _own(node: BundleNode, target: Target) -> str:
    """Of the path, what is ours alone."""
    return f"{runs_directory_on(target)}/{node.name}"


def _command(node: BundleNode, target: Target) -> str:
    return f"cd {_directory(node, target)} && setsid bash -- {shlex.quote(node.script)}"


def _ssh(target: Target) -> str:
    jumps = ",".join(_login(jump) for jump in target.jumps)
    words = ["ssh", *(["-J", jumps] if jumps else [])]
    return shlex.join(
        [*words, *(["-p", str(target.port)] if target.port != 22 else []), f"{target.user}@{target.hostname}"]
    )


def _login(target: Target) -> str:
    return f"{target.user}@{target.hostname}" + (f":{target.port}" if target.port != 22 else "")
