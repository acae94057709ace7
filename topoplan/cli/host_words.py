"""Parse hosts as people write them on the command line and in hosts files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from topoplan.errors import InputError
from topoplan.specs.cluster import Host
from topoplan.specs.source import read_text


def parse_host(text: str, *, where: str, workdir: str | None = None, venv: str | None = None) -> Host:
    """Parse `name`, `user@name`, `name:port`, `user@name:port` or `[address]:port`, as ssh does, into a host. Raises
    InputError for anything else; `where` names the option or the line of the file."""
    from topoplan.specs.mistakes import check_form

    user, at, place = text.rpartition("@")
    port = None
    # More than one colon without brackets is an IPv6 address, which cannot carry a port.
    if match := re.fullmatch(r"(\[[^\]]*\]|[^:]*):([0-9]{1,7})", place, re.ASCII):
        place, port = match[1], int(match[2])
    fields = {"address": place, "user": user if at else None, "port": port, "workdir": workdir, "venv": venv}
    host = check_form(Host, fields, lambda path: where)
    return replace(host, address=place[1:-1]) if place.startswith("[") and place.endswith("]") else host


def read_hosts_file(path: Path) -> list[tuple[str, str]]:
    """Return (host, `file:line`) of each line of a hosts file, ignoring comments and words such as `slots=8`. Raises
    InputError for a file that cannot be read or names no host."""
    found = [
        (words[0], f"{path}:{number}")
        for number, line in enumerate(read_text(path, wanted="give a file with a host a line").splitlines(), start=1)
        if (words := line.partition("#")[0].split())
    ]
    if not found:
        raise InputError("names no host", where=str(path), expected="expected a host a line, such as `node0 slots=8`")
    return found


def hosts_of(
    words: Iterable[str], hosts_file: str | None, *, workdir: str | None = None, venv: str | None = None
) -> list[Host]:
    """Return the hosts of the command line, then those of the file. Raises InputError for none, or for a duplicate."""
    given = [(word, f"HOST {word!r}") for word in words]
    if hosts_file is not None:
        given += read_hosts_file(Path(hosts_file))
    if not given:
        raise InputError("no host is given", remedy="name one, such as node0 or user@node0:22, or give --hosts-file")
    hosts: dict[tuple[str, int | None], str] = {}
    found = []
    for text, where in given:
        host = parse_host(text, where=where, workdir=workdir, venv=venv)
        if (earlier := hosts.setdefault((host.address, host.port), where)) != where or host in found:
            raise InputError(f"{text} was already given ({earlier})", where=where, remedy="name each machine once")
        found.append(host)
    return found
