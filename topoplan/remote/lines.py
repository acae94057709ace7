"""Split output that arrives in pieces at line ends."""

from __future__ import annotations

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
