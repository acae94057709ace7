"""Writing the output of nodes to standard output, as bytes, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topoplan.errors import HostError
    from topoplan.launch.connection import Stream


def write_lines(label: str, lines: Iterable[bytes], *, prefix: bool) -> None:
    """Lines of a node, each behind `[node-00] ` with `prefix`; a line without an end gets one then."""
    out = sys.stdout.buffer
    for line in lines:
        if prefix:
            out.write(f"[{label}] ".encode() + line + (b"" if line.endswith(b"\n") else b"\n"))
        else:
            out.write(line)
    out.flush()


def show_streams(streams: Mapping[str, Stream], *, prefix: bool) -> dict[str, int | HostError | None]:
    """Write what comes from all nodes until the last has ended; how each has: its code, or what became of the host."""
    from topoplan.launch.connection import Ended
    from topoplan.launch.lines import follow_lines

    ends: dict[str, int | HostError | None] = {}
    for label, item in follow_lines(streams):
        if isinstance(item, Ended):
            ends[label] = item.lost or item.code
        else:
            write_lines(label, item, prefix=prefix)
    return ends


def warn(text: str) -> None:
    """One line on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {text}\n")
