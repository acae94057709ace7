"""Output that comes in pieces, cut where lines end."""

from __future__ import annotations

LONGEST_BYTES = 64 * 1024
"""A line that has no end after so much gets one: binary output may have no line ends at all."""


class Lines:
    """Gives on whole lines, many at once, and keeps the beginning of the next, within bounds of memory."""

    def __init__(self, *, longest_bytes: int = LONGEST_BYTES, redrawn: bool = False) -> None:
        """Nothing yet. `redrawn`: of a long line that writes over itself with carriage returns only the end matters."""
        self._longest_bytes, self._redrawn = longest_bytes, redrawn
        self.open = b""
        """The last line, as far as it has come."""

    def add(self, data: bytes) -> bytes:
        """The lines that are whole now, each with its end; nothing where none is."""
        end = data.rfind(b"\n") + 1
        whole, self.open = (self.open + data[:end], data[end:]) if end else (b"", self.open + data)
        if len(self.open) > self._longest_bytes and self._redrawn:
            self.open = self.open[max(0, self.open.rstrip(b"\r\n\t ").rfind(b"\r")) :]
        if len(self.open) > self._longest_bytes:
            whole, self.open = whole + self.open + b"\n", b""
        return whole

    def rest(self) -> bytes:
        """The last line, which has no end; it is given one."""
        last, self.open = self.open, b""
        return last and last + b"\n"
