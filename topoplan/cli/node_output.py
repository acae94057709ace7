"""Write the output of nodes to standard output as it arrives."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable

from topoplan.run.shown import Lines, ShownLines

_BAR_S = 5.0
"""Interval for showing a moving progress bar, which otherwise gets a line only when it is done."""


class NodeOutput:
    """Prints node output as `launch` does, or with `raw` byte for byte; lines of several nodes get the prefix
    `[node-00] `."""

    def __init__(self, *, prefix: bool, raw: bool = False) -> None:
        """Start without output."""
        self._prefix, self._raw = prefix, raw
        self._lines: defaultdict[str, Lines] = defaultdict(Lines)
        self._shown: defaultdict[str, ShownLines] = defaultdict(ShownLines)
        self._bar_at: defaultdict[str, float] = defaultdict(time.monotonic)

    def add(self, label: str, data: bytes) -> None:
        """Print the next output of a node."""
        if self._raw:
            self._write_raw(label, self._lines[label].add(data) if self._prefix else data)
            return
        shown, now = self._shown[label], time.monotonic()
        lines = shown.feed(data)
        if now - self._bar_at[label] > _BAR_S:
            self._bar_at[label] = now
            lines += f"{bar}\n" if (bar := shown.bar()) is not None else ""
        self._write(label, lines)

    def end(self, label: str) -> None:
        """Finish a node's output, completing its last line."""
        if self._raw:
            self._write_raw(label, self._lines[label].rest())
        else:
            self._write(label, self._shown[label].end())

    def copy(self, label: str, pieces: Iterable[bytes]) -> None:
        """Print a node's complete output from elsewhere, such as a local copy."""
        for piece in pieces:
            self.add(label, piece)
        self.end(label)

    def _write(self, label: str, lines: str) -> None:
        if self._prefix and lines:
            lines = f"[{label}] " + lines[:-1].replace("\n", f"\n[{label}] ") + "\n"
        sys.stdout.write(lines)
        sys.stdout.flush()

    def _write_raw(self, label: str, data: bytes) -> None:
        if self._prefix and data:
            mark = f"[{label}] ".encode()
            data = mark + data[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def warn(text: str) -> None:
    """Print a line on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {text}\n")
