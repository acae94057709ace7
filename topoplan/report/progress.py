"""A progress line on standard error for long operations."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Self, TextIO

_QUIET_S = 1.0
_EVERY_S = 0.1
_ERASE = "\r\x1b[2K"


class ProgressLine:
    """A callback for (done, total) that shows a line after a second, on a terminal only, and erases it at the end."""

    def __init__(self, stream: TextIO | None = None, *, partial: bool = False, work: str = "the search") -> None:
        """`partial` means that an interrupted operation returns what it has so far."""
        self._stream = sys.stderr if stream is None else stream
        self.visible = self._stream.isatty()
        self._next_s = monotonic() + _QUIET_S
        self._drawn = False
        self._work = work
        self._on_interrupt = "ends it with what it has" if partial else "stops it"

    def __call__(self, done: int, total: int) -> None:
        """Show the progress, at most ten times per second."""
        now_s = monotonic()
        if not self.visible or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        self._drawn = True
        percent = 100 * done // total if total else 0
        self._stream.write(f"{_ERASE}topoplan: {percent}% of {self._work}; Ctrl-C {self._on_interrupt}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write(_ERASE)
            self._stream.flush()
