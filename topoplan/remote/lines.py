"""Output that comes in pieces, as whole lines."""

from __future__ import annotations

LONGEST_BYTES = 64 * 1024
"""A line is cut here: binary output may have no line ends at all."""


class Lines:
    """Puts lines together from pieces that are cut anywhere, within bounds of memory."""

    def __init__(self, *, longest_bytes: int = LONGEST_BYTES, redrawn: bool = False) -> None:
        """Nothing yet. `redrawn`: of a long line that writes over itself with carriage returns only the end matters."""
        self._longest_bytes, self._redrawn = longest_bytes, redrawn
        self.open = b""
        """The last line, as far as it has come."""

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, each with its line end, if it has one."""
        *whole, self.open = (self.open + data).split(b"\n")
        found = [piece for line in whole for piece in self._pieces(line, b"\n")]
        *over, self.open = self._pieces(self.open)
        return found + over

    def rest(self) -> list[bytes]:
        """The last line, which has no end."""
        last, self.open = self.open, b""
        return [last] if last else []

    def _pieces(self, line: bytes, end: bytes = b"") -> list[bytes]:
        """At least one, none longer than is allowed; the line's end comes on top of that."""
        longest = self._longest_bytes
        if len(line) <= longest:
            return [line + end]
        if self._redrawn and b"\r" in line:
            written = line.rstrip(b"\r\n\t ")
            line = line[max(0, written.rfind(b"\r")) :]
        starts = range(0, max(1, len(line)), longest)
        return [line[at : at + longest] + (end if at == starts[-1] else b"") for at in starts]
