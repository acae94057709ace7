"""Output of several nodes as whole lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.launch.connection import Chunk, Ended, Stream, follow

LONGEST_BYTES = 64 * 1024
"""A line is cut here: binary output may have no line ends at all."""


class Lines:
    """Puts lines together from pieces that are cut anywhere."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._open = b""

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, each with its line end, if it has one."""
        *whole, self._open = _split(self._open + data)
        return whole

    def rest(self) -> list[bytes]:
        """The last line, which has no end."""
        last, self._open = self._open, b""
        return [last] if last else []


def _split(data: bytes) -> list[bytes]:
    """Lines with their ends; the last one has none, and may be empty."""
    parts = data.split(b"\n")
    found = []
    for index, part in enumerate(parts):
        line = part + b"\n" if index < len(parts) - 1 else part
        while len(line) > LONGEST_BYTES:
            found.append(line[:LONGEST_BYTES])
            line = line[LONGEST_BYTES:]
        found.append(line)
    return found


def follow_lines(streams: Mapping[str, Stream]) -> Iterator[tuple[str, list[bytes] | Ended]]:
    """The lines of several logs as they come, some at a time, and the end of each.

    Nodes write both outputs into one log; what comes on standard error is the follower's own, and is left out.
    """
    open_lines = {name: Lines() for name in streams}
    for name, item in follow(streams):
        if isinstance(item, Chunk):
            if item.source == "stdout" and (whole := open_lines[name].add(item.data)):
                yield name, whole
        else:
            if last := open_lines[name].rest():
                yield name, last
            yield name, item
