"""The output of a program as lines that are safe to show: bytes in, text out.

What a terminal would obey and what is no text is taken out or escaped (`topoplan.terminal`); the bytes themselves are
kept in the log file. Output may come faster than Python looks at lines, so that is done only where there is something
to take out.
"""

from __future__ import annotations

from collections import deque

from topoplan.remote.lines import Lines
from topoplan.run.rank_lines import both_ends
from topoplan.terminal import plain, plain_lines

MOST_BYTES = 16 * 1024
"""Longest line without an end that is waited for."""
KEEP_LINES = 400
"""Last lines of each node that are kept in memory, to find out why it failed."""
_KEEP_CHARACTERS = 64 * 1024
"""At most."""
_PRINTED = bytes([*range(0x20, 0x7F), 0x0A])


def shown_line(line: bytes) -> str:
    """One line for a terminal; of a progress bar, written over itself with carriage returns, its last state."""
    if b"\r" in line:
        line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    return plain(line.decode("utf-8", "backslashreplace"))


def shown_lines(lines: bytes) -> str:
    """Whole lines for a terminal, each with its end."""
    if not lines.translate(None, _PRINTED):
        return lines.decode("ascii")
    if b"\r" in lines:
        return "".join(f"{shown_line(line)}\n" for line in lines.split(b"\n")[:-1])
    return plain_lines(lines.decode("utf-8", "backslashreplace"))


class ShownLines:
    """`Lines` as they are shown."""

    def __init__(self) -> None:
        self._lines = Lines(longest_bytes=MOST_BYTES, redrawn=True)
        self._bar = ""

    def feed(self, data: bytes) -> str:
        """The lines that `data` completes, each with its end."""
        return shown_lines(self._lines.add(data))

    def bar(self) -> str | None:
        """The state of a progress bar whose line is not complete, if it is another than the last time."""
        if b"\r" not in self._lines.open:
            return None
        state = shown_line(self._lines.open)
        if state == self._bar:
            return None
        self._bar = state
        return state

    def end(self) -> str:
        """What is left without a line's end, as a line."""
        rest = self._lines.rest()
        return shown_lines(rest) if rest.strip() else ""


class Tail:
    """The last lines of an output."""

    def __init__(self, text: str = "") -> None:
        self._parts = deque([text])
        self._size = len(text)

    def add(self, text: str) -> None:
        """Whole lines that come next."""
        begin = text.rfind("\n", 0, max(0, len(text) - _KEEP_CHARACTERS)) + 1
        self._parts.append("\n".join(map(both_ends, text[begin:].split("\n"))))
        self._size += len(self._parts[-1])
        while self._size - len(self._parts[0]) > _KEEP_CHARACTERS:
            self._size -= len(self._parts.popleft())

    def lines(self) -> list[str]:
        """As they are now, without their ends."""
        return "".join(self._parts).split("\n")[:-1][-KEEP_LINES:]
