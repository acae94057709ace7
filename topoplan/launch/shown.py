"""The output of a program as lines that are safe to show: bytes in, text out.

What a terminal would obey (colours, cursor movements, a bell) and what is no text is taken out or escaped; the bytes
themselves are kept in the log file.
"""

from __future__ import annotations

import re

MOST_BYTES = 16 * 1024
"""Longest line that is shown; what is longer comes in pieces."""

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
"""ECMA-48: control sequences, operating system commands up to their end, and two-character escapes."""


def shown_line(line: bytes) -> str:
    """One line for a terminal; of a progress bar, written over itself with carriage returns, its last state."""
    if b"\r" in line:
        line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    text = line.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    text = _CONTROL.sub("", text).expandtabs()
    return text if text.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class ShownLines:
    """Puts chunks together to lines, within bounds of memory."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._rest = b""
        self._bar = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in _pieces(line)]
        if len(self._rest) > MOST_BYTES:
            if b"\r" in self._rest:
                self._rest = self._rest[self._rest.rindex(b"\r") :]
            while len(self._rest) > MOST_BYTES:
                lines.append(shown_line(self._rest[:MOST_BYTES]))
                self._rest = self._rest[MOST_BYTES:]
        return lines

    def bar(self) -> str | None:
        """The state of a progress bar whose line is not complete, if it is another than the last time."""
        if b"\r" not in self._rest:
            return None
        state = shown_line(self._rest)
        if state == self._bar:
            return None
        self._bar = state
        return state

    def end(self) -> list[str]:
        """What is left without a line's end."""
        rest, self._rest = self._rest, b""
        return [shown_line(rest)] if rest.strip() else []


def _pieces(line: bytes) -> list[str]:
    if len(line) <= MOST_BYTES or b"\r" in line:
        return [shown_line(line)[:MOST_BYTES]]
    return [shown_line(line[start : start + MOST_BYTES]) for start in range(0, len(line), MOST_BYTES)]
