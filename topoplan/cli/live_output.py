"""The output of a run: its nodes' lines and its events, which a slow or halted terminal does not hold up."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.ssh_options import access
from topoplan.run.shown import Lines, ShownLines

if TYPE_CHECKING:
    from topoplan.remote.identities import Access
    from topoplan.run.events import Event
    from topoplan.run.progress import Status


MOST_CHARACTERS = 4 * 2**20
"""Limit on the text that waits for the terminal; beyond it, lines of output are dropped and counted."""
_AT_ONCE = 256
"""Maximum number of texts written together."""
_KEEP_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    stream: TextIO


class LiveOutput:
    """Writes to standard output and standard error, in order, from a thread of its own."""

    def __init__(self, *, keep_status: bool = False) -> None:
        """Start the thread. With `keep_status`, the last `show` stays below the lines on a terminal, and is repeated
        periodically elsewhere."""
        from topoplan.report.progress import StatusLine

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


class EventOutput:
    """Shows events as they come: the nodes' output on standard output, topoplan's messages on standard error, and the
    training progress below them. As JSON, everything goes to standard output."""

    def __init__(self, schema: str | None = None) -> None:
        """`schema` is the schema name of the JSON objects; None selects text."""
        self._schema = schema
        self._output = LiveOutput(keep_status=schema is None)

    @property
    def reader_has_left(self) -> bool:
        """Whether the reader of standard output has closed it (`| head`)."""
        return self._output.reader_has_left

    def tell(self, event: Event) -> None:
        """Show an event. Thread-safe."""
        from topoplan.report.session import OUTPUT, event_text, event_to_json

        output = self._output
        if self._schema is not None:
            text = event_to_json(event, self._schema)
            output.lines(text) if event.kind in OUTPUT else output.message(text, stdout=True)
        elif event.status is not None:
            output.show(event.status)
        elif event.kind in OUTPUT:
            output.lines(event_text(event))
        else:
            output.message(event_text(event))

    def access(self, *, accept_new: bool) -> Access:
        """Return the SSH credentials, with new host keys reported as events."""
        from topoplan.run.events import Event

        who = access(accept_new=accept_new)
        who.on_new_key = lambda new: self.tell(
            Event(
                kind="new-key",
                text=f"{new.host}: new host key {new.key.fingerprint} noted in {new.file}",
                data={"host": new.host, "fingerprint": new.key.fingerprint},
            )
        )
        return who

    def end(self, document: Mapping[str, Any], lines: Iterable[str], code: int, interrupts: Interrupts) -> None:
        """Report how the run ended, and flush the output. A user who interrupts the flush exits with `code`."""
        if self._schema is not None:
            self._output.message(json.dumps(document), stdout=True)
        else:
            for line in lines:
                self._output.message(line)
        while not self._output.close(limit_s=1.0):
            if interrupts.wants_out:
                # A halted terminal (Ctrl-S) must not hold up a user who wants to leave; nor may the final flush.
                os._exit(code)


_BAR_S = 5.0
"""Interval for showing a moving progress bar, which otherwise gets a line only when it is done."""


class NodeOutput:
    """Prints node output as `launch` does, or with `raw` byte for byte; lines of several nodes get the prefix
    `[node-00] `."""

    def __init__(self, *, prefix: bool, raw: bool = False) -> None:
        """Start without output."""
        self._prefix, self._raw = prefix, raw
        self._lines: defaultdict[str, Lines] = defaultdict(Lines)
        self._shown: defaultdict[str, ShownLines] = defaultdict(ShownLines)
        self._bar_at: defaultdict[str, float] = defaultdict(time.monotonic)

    def add(self, label: str, data: bytes) -> None:
        """Print the next output of a node."""
        if self._raw:
            self._write_raw(label, self._lines[label].add(data) if self._prefix else data)
            return
        shown, now = self._shown[label], time.monotonic()
        lines = shown.feed(data)
        if now - self._bar_at[label] > _BAR_S:
            self._bar_at[label] = now
            lines += f"{bar}\n" if (bar := shown.bar()) is not None else ""
        self._write(label, lines)

    def end(self, label: str) -> None:
        """Finish a node's output, completing its last line."""
        if self._raw:
            self._write_raw(label, self._lines[label].rest())
        else:
            self._write(label, self._shown[label].end())

    def copy(self, label: str, pieces: Iterable[bytes]) -> None:
        """Print a node's complete output from elsewhere, such as a local copy."""
        for piece in pieces:
            self.add(label, piece)
        self.end(label)

    def _write(self, label: str, lines: str) -> None:
        if self._prefix and lines:
            lines = f"[{label}] " + lines[:-1].replace("\n", f"\n[{label}] ") + "\n"
        sys.stdout.write(lines)
        sys.stdout.flush()

    def _write_raw(self, label: str, data: bytes) -> None:
        if self._prefix and data:
            mark = f"[{label}] ".encode()
            data = mark + data[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
