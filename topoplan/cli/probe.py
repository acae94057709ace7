"""`topoplan probe`: describe real machines as a spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, argument, option
from topoplan.cli.output import print_json, stdout_console
from topoplan.cli.ssh_options import AcceptNew, access
from topoplan.errors import InputError, OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.hosts.cluster_yaml import SpecDraft
    from topoplan.hosts.probe import ProbeResults
    from topoplan.specs.cluster import Host

_WRITER = "topoplan probe"


Machines = Annotated[
    list[str] | None, argument("HOST...", "Machines as ssh takes them: an alias, user@host, host:port. Rank 0 first.")
]
HostsFile = Annotated[str | None, option("--hosts-file FILE", "More of them, one a line (`node0 slots=8`).")]
Workdir = Annotated[str | None, option("--workdir DIR", "Directory on the hosts for runs, for the spec.")]
Venv = Annotated[
    str | None, option("--venv DIR", "The trainer's virtual environment on the hosts: its versions are read.")
]


def probe(
    hosts: Machines = None,
    hosts_file: HostsFile = None,
    output: Annotated[str | None, option("--output -o FILE", "Write the spec to a file; by default to stdout.")] = None,
    name: Annotated[str | None, option("--name NAME", "Name of the cluster; by default the GPU and how many.")] = None,
    workdir: Workdir = None,
    venv: Venv = None,
    partial: Annotated[bool, option("--partial", "Make a spec of the hosts that answer.")] = False,
    force: Annotated[bool, option("--force", "Overwrite a file that was edited, or written by others.")] = False,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> None:
    """The spec is suitable for `topoplan rank`. Nothing is changed on the machines.

    Exit code 1: a host could not be queried, or the hosts make no cluster; 2: bad input.
    """
    from topoplan.cli.host_words import hosts_of
    from topoplan.hosts.cluster_yaml import cluster_spec

    chosen = hosts_of(hosts or (), hosts_file, workdir=workdir, venv=venv)
    _check_name(name)
    asked = ask(chosen, accept_new=accept_new)
    draft = cluster_spec(asked.reached, name=name) if asked.reached and (partial or not asked.failed) else None
    if draft is not None and draft.text is not None and output is not None:
        _write(draft.text, output, force=force)
    _show(asked, draft, output, as_json=as_json)
    if draft is None or draft.text is None:
        raise typer.Exit(1)


def ask(hosts: Sequence[Host], *, accept_new: bool) -> ProbeResults:
    """Query hosts for their properties. Raises InputError for a host that is given twice."""
    from topoplan.hosts.probe import probe_hosts
    from topoplan.remote.ssh_config import SshConfig

    targets = SshConfig().targets(hosts)
    if len(targets) < len(hosts):
        raise InputError("a host is given twice", remedy="name each machine once")
    return probe_hosts(hosts, targets, access(accept_new=accept_new))


def _write(text: str, output: str, *, force: bool) -> None:
    """Write the spec. Raises OutputError for one that was edited since topoplan wrote it, unless `force`."""
    from topoplan.bundle.write import write_file
    from topoplan.hosts.cluster_yaml import MARK, is_edited

    try:
        edited = not force and is_edited(Path(output).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        edited = False  # unreadable: writing will report what is wrong
    if edited:
        remedy = "name another, or overwrite with --force"
        raise OutputError(f"was edited since `{_WRITER}` wrote it", where=str(Path(output)), remedy=remedy)
    write_file(output, text, mark=MARK, writer=_WRITER, force=force)


def _show(asked: ProbeResults, draft: SpecDraft | None, output: str | None, *, as_json: bool) -> None:
    from topoplan.report.hosts import print_probe, probe_to_dict

    text = draft.text if draft else None
    written = output if text is not None else None
    if as_json:
        print_json(probe_to_dict(asked.reached, asked.failed, draft, written))
        return
    console = stdout_console()
    if output is None:
        console.file = sys.stderr
    print_probe(console, asked.reached, asked.failed, draft, written=written)
    if text is not None and output is None:
        sys.stderr.flush()
        sys.stdout.write(text)


def _check_name(name: str | None) -> None:
    from topoplan.specs.forms import SpecForm
    from topoplan.specs.mistakes import check_form

    check_form(SpecForm, {"gpu": "h100-sxm-80gb", **({"name": name} if name else {})}, lambda path: "--name")
