"""The output of a program as lines that are safe to show: bytes in, text out.

What a terminal would obey and what is no text is taken out or escaped (`topoplan.terminal`); the bytes themselves are
kept in the log file.
"""

from __future__ import annotations

from topoplan.remote.lines import Lines
from topoplan.terminal import plain

MOST_BYTES = 16 * 1024
"""Longest line that is shown; what is longer comes in pieces."""


def shown_line(line: bytes) -> str:
    """One line for a terminal; of a progress bar, written over itself with carriage returns, its last state."""
    if b"\r" in line:
        line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    return plain(line.decode("utf-8", "backslashreplace"))


class ShownLines:
    """`Lines` as they are shown."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._lines = Lines(longest_bytes=MOST_BYTES, redrawn=True)
        self._bar = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        return [shown_line(line.removesuffix(b"\n")) for line in self._lines.add(data)]

    def bar(self) -> str | None:
        """The state of a progress bar whose line is not complete, if it is another than the last time."""
        if b"\r" not in self._lines.open:
            return None
        state = shown_line(self._lines.open)
        if state == self._bar:
            return None
        self._bar = state
        return state

    def end(self) -> list[str]:
        """What is left without a line's end."""
        return [shown_line(line) for line in self._lines.rest() if line.strip()]
