"""Parse CPUs, memory, limits and file systems from the output of lscpu, /proc, ulimit, cgroups and df."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.hosts.facts import PathFacts
from topoplan.hosts.sections import number, pairs

UNLIMITED = -1
_NO_LIMIT_BYTES = 2**60
"""cgroups of version 1 use a number near 2^63 for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """A line of `df -PkT` or `df -Pk`."""

    source: str
    kind: str
    """Type of the file system; empty without -T."""
    size_bytes: int
    free_bytes: int


def parse_meminfo(text: str) -> Mapping[str, int]:
    """Return MemTotal, MemAvailable and the other sizes of /proc/meminfo in bytes."""
    lines = re.findall(r"^(\w{1,40}): +(\d{1,15}) kB", text, re.MULTILINE | re.ASCII)
    return {name: int(kib) * 1024 for name, kib in lines}


def parse_df(text: str, *, has_type: bool) -> FileSystem | None:
    """Parse the last line of `df -PkT` (which has types) or `df -Pk`; names may contain blanks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = r"\s+(\S+)" if has_type else "()"
    sizes = r"\s+(\d{1,18})\s+(?:\d{1,18}|-)\s+(-?\d{1,18})\s+(?:\d+%|-)\s+/.*"
    match = re.fullmatch(rf"(.+?){kind}{sizes}", lines[-1][:4096] if lines else "", re.ASCII)
    if match is None:
        return None
    return FileSystem(
        source=match[1], kind=match[2], size_bytes=int(match[3]) * 1024, free_bytes=max(0, int(match[4])) * 1024
    )


def parse_limits(text: str) -> tuple[int | None, int | None]:
    """Return the limits of `ulimit` for locked memory in bytes and for open files; -1 for no limit."""
    said = dict(pairs(text))

    def limit(name: str, unit: int) -> int | None:
        value = said.get(name, "")
        count = number(value)
        return UNLIMITED if value == "unlimited" else None if count is None else count * unit

    return limit("memlock", 1024), limit("open_files", 1)


def parse_cgroup_memory(text: str) -> int | None:
    """Return the tightest memory limit in bytes of all cgroups that contain the session; None if there is none."""
    limits = [limit for _, value in pairs(text) if (limit := number(value)) is not None and 0 < limit < _NO_LIMIT_BYTES]
    return min(limits, default=None)


def parse_port_range(text: str) -> tuple[int, int] | None:
    """Return the two ports of net.ipv4.ip_local_port_range."""
    ports = [number(word) for word in text.split()]
    if len(ports) == 2 and ports[0] is not None and ports[1] is not None and 0 <= ports[0] <= ports[1] < 65536:
        return ports[0], ports[1]
    return None


def parse_path(text: str) -> PathFacts | None:
    """Parse a path section of the collecting script; what was cut off is None."""
    said = dict(pairs(text))
    path = said.get("path")
    if path is None or "exists" not in said:
        return None
    disk = parse_df(said.get("df", ""), has_type=True)
    writable = said.get("writable")
    digest = re.match(r"[0-9a-f]{64}\b", said.get("fingerprint", ""), re.ASCII)
    return PathFacts(
        path=path,
        exists=said["exists"] == "yes",
        is_writable=None if writable is None else writable == "yes",
        file_system=disk.kind if disk else "",
        mount=disk.source if disk else "",
        free_bytes=disk.free_bytes if disk else None,
        fingerprint=digest[0] if digest else "",
        size_bytes=number(said.get("size", "")),
        files=number(said.get("files", "")),
        numbered=tuple(said["numbered"].split()) if "numbered" in said else None,
    )


def parse_nccl_settings(text: str) -> Mapping[str, str]:
    """Return the NCCL_* settings of the environment and of NCCL's own files; the environment takes precedence."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"\s*(NCCL_[A-Z0-9_]{1,60})\s*=\s*(.*?)\s*", line):
            found.setdefault(match[1], match[2])
    return found


def parse_cpus(text: str) -> tuple[int | None, int | None]:
    """Return the number of sockets, and of physical cores over all sockets, from the output of `lscpu`.

    Machines that report no sockets (`-`, or clusters on Arm) give the numbers that they have.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value)
    sockets = _positive(fields.get("Socket(s)", "")) or _positive(fields.get("Cluster(s)", ""))
    per_socket = _positive(fields.get("Core(s) per socket", "")) or _positive(fields.get("Core(s) per cluster", ""))
    return sockets, sockets * per_socket if sockets and per_socket else None


def _positive(text: str) -> int | None:
    count = number(text)
    return count if count and count > 0 else None
