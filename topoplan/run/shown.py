"""Convert the output of a program to lines that are safe to show: bytes in, text out.

Terminal control sequences and invalid text are removed or escaped (`topoplan.terminal`); the log file keeps the
original bytes. Output may arrive faster than Python can inspect lines, so they are only processed if there is something
to remove.
"""

from __future__ import annotations

from collections import deque

from topoplan.run.rank_lines import both_ends
from topoplan.terminal import plain, plain_lines

MOST_BYTES = 16 * 1024
"""Longest incomplete line that is buffered."""
KEEP_LINES = 400
"""Number of last lines kept in memory per node, to find out why it failed."""
_KEEP_CHARACTERS = 64 * 1024
"""Limit for the characters of these lines."""
_PRINTED = bytes([*range(0x20, 0x7F), 0x0A])


def shown_line(line: bytes) -> str:
    """Return one line for a terminal; of a progress bar, which overwrites itself, only the last state is kept."""
    if b"\r" in line:
        line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    return plain(line.decode("utf-8", "backslashreplace"))


def shown_lines(lines: bytes) -> str:
    """Return complete lines for a terminal, each with its line end."""
    if not lines.translate(None, _PRINTED):
        return lines.decode("ascii")
    if b"\r" in lines:
        return "".join(f"{shown_line(line)}\n" for line in lines.split(b"\n")[:-1])
    return plain_lines(lines.decode("utf-8", "backslashreplace"))


class ShownLines:
    """Splits output into lines that are safe to show."""

    def __init__(self) -> None:
        self._lines = Lines(longest_bytes=MOST_BYTES, redrawn=True)
        self._bar = ""

    def feed(self, data: bytes) -> str:
        """Return the lines that `data` completes, each with its line end."""
        return shown_lines(self._lines.add(data))

    def bar(self) -> str | None:
        """Return the state of a progress bar on the incomplete line, if it has changed since the last call."""
        if b"\r" not in self._lines.open:
            return None
        state = shown_line(self._lines.open)
        if state == self._bar:
            return None
        self._bar = state
        return state

    def end(self) -> str:
        """Return the rest of the output without a line end, as a line."""
        rest = self._lines.rest()
        return shown_lines(rest) if rest.strip() else ""


class Tail:
    """The last lines of an output."""

    def __init__(self, text: str = "") -> None:
        self._parts = deque([text])
        self._size = len(text)

    def add(self, text: str) -> None:
        """Append complete lines. They are split and shortened only if somebody asks for them."""
        self._parts.append(text[_last_lines(text) :])
        self._size += len(self._parts[-1])
        while self._size - len(self._parts[0]) > _KEEP_CHARACTERS:
            self._size -= len(self._parts.popleft())

    def lines(self) -> list[str]:
        """Return the current lines, without line ends."""
        text = "".join(self._parts)
        return [both_ends(line) for line in text[_last_lines(text) :].split("\n")[:-1][-KEEP_LINES:]]


def _last_lines(text: str) -> int:
    """Return the index of the first line of the end that is kept."""
    return text.rfind("\n", 0, max(0, len(text) - _KEEP_CHARACTERS)) + 1


LONGEST_BYTES = 64 * 1024
"""A line without an end gets one after this many bytes: binary output may have no line ends at all."""


class Lines:
    """Passes on complete lines, many at once, and buffers the beginning of the next one, within bounded memory."""

    def __init__(self, *, longest_bytes: int = LONGEST_BYTES, redrawn: bool = False) -> None:
        """Start empty. `redrawn`: of a long line that overwrites itself with carriage returns, only the end matters."""
        self._longest_bytes, self._redrawn = longest_bytes, redrawn
        self.open = b""
        """The last line, as far as it has arrived."""

    def add(self, data: bytes) -> bytes:
        """Return the lines that are complete now, each with its end; empty if there are none."""
        end = data.rfind(b"\n") + 1
        whole, self.open = (self.open + data[:end], data[end:]) if end else (b"", self.open + data)
        if len(self.open) > self._longest_bytes and self._redrawn:
            self.open = self.open[max(0, self.open.rstrip(b"\r\n\t ").rfind(b"\r")) :]
        if len(self.open) > self._longest_bytes:
            whole, self.open = whole + self.open + b"\n", b""
        return whole

    def rest(self) -> bytes:
        """Return the last, incomplete line with a line end added."""
        last, self.open = self.open, b""
        return last and last + b"\n"
