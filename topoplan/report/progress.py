"""Progress lines: of a long operation, on standard error; and of a run, below its log lines on a terminal."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Self, TextIO

from topoplan.report.text import duration, significant

if TYPE_CHECKING:
    from topoplan.run.progress import Status

_QUIET_S = 1.0
_EVERY_S = 0.1
"""Minimum interval between redraws on a terminal, except after log lines."""
_PLAIN_EVERY_S = 30.0
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


def status_line(status: Status, *, width: int | None = None) -> str:
    """Return `step 12/46 loss 1.8 4,210 tokens/s per GPU 3.04 s per step (predicted 2.9 to 3.4) 3 h 51 min left`.
    Unknown parts are left out, and so are the least important ones if the line exceeds `width` columns."""
    total = f"/{status.total_steps:,}" if status.total_steps is not None else ""
    step = f"step {status.step:,}{total}"
    loss = f"loss {status.loss:.4g}" if status.loss is not None else ""
    speed = ""
    if status.tokens_per_s_per_gpu is not None:
        speed = f"{significant(status.tokens_per_s_per_gpu, _digits(status.tokens_per_s_per_gpu))} tokens/s per GPU"
    pace = f"{significant(status.step_s)} s per step" if status.step_s is not None else ""
    left = f"{duration(status.left_s)} left" if status.left_s is not None else ""
    short = pace
    if pace and status.predicted_band_s is not None:
        pace += f" (predicted {_band(status)})"
    # From the complete line down to the step alone.
    for parts in (
        (step, loss, speed, pace, left),
        (step, loss, speed, short, left),
        (step, loss, short, left),
        (step, loss, left),
        (step, left),
    ):
        line = "  ".join(part for part in parts if part)
        if width is None or len(line) <= width:
            return line
    return step[:width]


def _band(status: Status) -> str:
    low, high = status.predicted_band_s or (0.0, 0.0)
    decimals = len(significant(low, 2).partition(".")[2])
    words = f"{low:,.{decimals}f} to {high:,.{decimals}f}"
    if status.in_band is False and status.step_s is not None:
        words += ": slower" if status.step_s > high else ": faster"
    return words


def _digits(value: float) -> int:
    """Return the significant digits to show: three, or for 1000 and more at least all digits of the whole part."""
    return max(4, len(str(int(value)))) if value >= 1000 else 3


class StatusLine:
    """Writes log lines to a stream and keeps a status line of the run below them. If the stream is not a terminal, the
    status line is written among the log lines every half minute, and at the end."""

    def __init__(
        self, stream: TextIO, *, every_s: float = _PLAIN_EVERY_S, clock: Callable[[], float] = monotonic
    ) -> None:
        """`every_s` is the interval for a stream that is not a terminal."""
        self._stream, self._clock = stream, clock
        self.on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._every_s = _EVERY_S if self.on_terminal else every_s
        self._status: Status | None = None
        self._note = ""
        self._due_s = -math.inf
        self._written: str | None = None
        self._drawn = False

    def show(self, status: Status) -> None:
        """Show a new status of the run."""
        self._status, self._note = status, ""
        self.keep_up()

    def note(self, text: str) -> None:
        """Show a text such as `connecting: 3 of 4 nodes` until the next `show`; off a terminal, write it at once."""
        if text == self._note:
            return
        self._note = text
        self._due_s = -math.inf
        self.keep_up()

    def write(self, lines: str) -> None:
        """Write complete log lines, including their line ends."""
        self._erase()
        self._stream.write(lines)
        if self.on_terminal:
            self._draw()
        self._stream.flush()

    def keep_up(self) -> None:
        """Write the status line if it is due and has changed."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        if self.on_terminal:
            self._erase()
            self._draw()
        else:
            text = self._text(None)
            if not text or text == self._written:
                return
            self._written = text
            self._stream.write(text + "\n")
        self._due_s = now_s + self._every_s
        self._stream.flush()

    def close(self) -> None:
        """Write the last status as an ordinary line, if it is not already the last one written."""
        self._erase()
        text = status_line(self._status) if self._status is not None else ""
        if text and text != self._written:
            self._stream.write(text + "\n")
            self._written = text
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _text(self, width: int | None) -> str:
        if self._note or self._status is None:
            return self._note[:width]
        return status_line(self._status, width=width)

    def _draw(self) -> None:
        # Leave one column free: some terminals wrap when the last one is filled.
        text = self._text(max(1, self._columns() - 1))
        self._stream.write(text)
        self._drawn = bool(text)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(_ERASE)
            self._drawn = False

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80
