"""Parse the output of `lscpu`."""

from __future__ import annotations

from topoplan.hosts.sections import number


def parse_cpus(text: str) -> tuple[int | None, int | None]:
    """Return the number of sockets, and of physical cores over all sockets.

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
