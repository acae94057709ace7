"""CPUs, from `lscpu`."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.hosts.sections import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """Of one machine."""

    sockets: int | None = None
    cores: int | None = None
    """Physical ones, over all sockets."""


def parse_cpus(text: str) -> Cpus:
    """Sockets and physical cores. Machines without sockets in the usual sense (`-`, or clusters on Arm) give what they
    have."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value)
    sockets = _positive(fields.get("Socket(s)", "")) or _positive(fields.get("Cluster(s)", ""))
    per_socket = _positive(fields.get("Core(s) per socket", "")) or _positive(fields.get("Core(s) per cluster", ""))
    cores = sockets * per_socket if sockets and per_socket else None
    return Cpus(sockets=sockets, cores=cores)


def _positive(text: str) -> int | None:
    count = number(text)
    return count if count and count > 0 else None
