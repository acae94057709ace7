"""Output while something runs, which a slow or halted terminal does not hold up."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from topoplan.run.progress import Status

MOST_CHARACTERS = 4 * 2**20
"""Limit on the text that waits for the terminal; beyond it, lines of output are dropped and counted."""
_AT_ONCE = 256
"""Maximum number of texts written together."""
_KEEP_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Text:
    """One or more lines waiting to be written."""

    text: str
    stream: TextIO


class LiveOutput:
    """Writes to standard output and standard error, in order, from a thread of its own."""

    def __init__(self, *, keep_status: bool = False) -> None:
        """Start the thread. With `keep_status`, the last `show` stays below the lines on a terminal, and is repeated
        periodically elsewhere."""
        from topoplan.report.progress_line import StatusLine

        self._waiting: deque[_Text | Status] = deque()
        self._size = 0
        self._left_out = 0
        self._wake = threading.Condition()
        self._closed = False
        self._broken: set[TextIO] = set()
        self.reader_has_left = False
        """Whether the reader of standard output has closed it (`| head`)."""
        self._status = StatusLine(sys.stdout) if keep_status else None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def lines(self, text: str) -> None:
        """Queue lines for standard output, which may be dropped if there are too many."""
        with self._wake:
            if self._size > MOST_CHARACTERS:
                self._left_out += 1 + text.count("\n")
                return
            self._tell_left_out()
            self._put(_Text(text, sys.stdout))

    def message(self, text: str, *, stdout: bool = False) -> None:
        """Queue a line that is always shown, by default on standard error."""
        with self._wake:
            self._tell_left_out()
            self._put(_Text(text, sys.stdout if stdout else sys.stderr))

    def show(self, status: Status) -> None:
        """Replace the run's status line."""
        with self._wake:
            self._put(status)

    def close(self, limit_s: float) -> bool:
        """Write what is left, for at most `limit_s`; return whether everything was written. May be called again."""
        with self._wake:
            self._tell_left_out()
            self._closed = True
            self._wake.notify()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._put(_Text(f"({self._left_out:,} lines not shown: the terminal is too slow)", sys.stderr))
            self._left_out = 0

    def _put(self, item: _Text | Status) -> None:
        self._waiting.append(item)
        self._size += len(item.text) if isinstance(item, _Text) else 1
        self._wake.notify()

    def _write(self) -> None:
        while True:
            with self._wake:
                if not self._waiting and not self._closed:
                    self._wake.wait(_KEEP_UP_S)
                batch, self._waiting = self._waiting, deque()
                over = self._closed
            while batch:
                item = batch.popleft()
                if isinstance(item, _Text):
                    texts = [item.text]
                    while batch and len(texts) < _AT_ONCE:
                        other = batch[0]
                        if not isinstance(other, _Text) or other.stream is not item.stream:
                            break
                        texts.append(other.text)
                        batch.popleft()
                    self._try(item.stream, lambda texts=texts, to=item.stream: self._out(to, texts))  # type: ignore[misc]
                    size = sum(map(len, texts))
                else:
                    if self._status is not None:
                        self._try(sys.stdout, lambda item=item: self._status.show(item))  # type: ignore[misc]
                    size = 1
                with self._wake:
                    self._size -= size
            if self._status is not None:
                self._try(sys.stdout, self._status.close if over else self._status.keep_up)
            if over and not batch and not self._waiting:
                return

    def _out(self, stream: TextIO, texts: list[str]) -> None:
        text = "\n".join(texts) + "\n"
        on_terminal = self._status is not None and self._status.on_terminal and stream.isatty()
        if self._status is not None and (stream is sys.stdout or on_terminal):
            self._status.write(text)
        else:
            stream.write(text)
            stream.flush()

    def _try(self, stream: TextIO, write: Callable[[], None]) -> None:
        """Write to a stream; if the reader has gone or the disk is full, stop showing, but let the run go on."""
        if stream in self._broken:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            self._broken.add(stream)
            self.reader_has_left |= stream is sys.stdout and isinstance(error, BrokenPipeError)
