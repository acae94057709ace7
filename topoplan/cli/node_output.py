"""Writing the output of nodes to standard output, as bytes, as it comes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable

from topoplan.launch.lines import Lines


class NodeOutput:
    """The output of one node as it is, or that of several with each line behind `[node-00] `."""

    def __init__(self, *, prefix: bool) -> None:
        """Nothing yet."""
        self._prefix = prefix
        self._lines: defaultdict[str, Lines] = defaultdict(Lines)

    def add(self, label: str, data: bytes) -> None:
        """What comes next from a node."""
        self.write(label, self._lines[label].add(data) if self._prefix else [data])

    def end(self, label: str) -> None:
        """Nothing more comes from it: a last line without an end gets one."""
        self.write(label, self._lines[label].rest())

    def write(self, label: str, lines: Iterable[bytes]) -> None:
        """Whole lines of a node."""
        out = sys.stdout.buffer
        for line in lines:
            if self._prefix:
                out.write(f"[{label}] ".encode() + line + (b"" if line.endswith(b"\n") else b"\n"))
            else:
                out.write(line)
        out.flush()


def warn(text: str) -> None:
    """One line on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {text}\n")
