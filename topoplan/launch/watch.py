"""Watching the nodes of a run: their output as it comes, what they end with, and who failed first.

The job lives on its hosts, in sessions of its own; this only looks. So a connection that is lost is made again, and the
log goes on at the byte where it stopped: a cut that heals loses nothing. Only a host that does not come back within
`reconnect_s` counts as lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from topoplan.errors import HostError
from topoplan.launch.connection import Bell, Chunk, Connection, Ended, Stream
from topoplan.launch.events import Event, Tell
from topoplan.launch.node import NodeState, follow_node, node_state
from topoplan.launch.shown import ShownLines
from topoplan.launch.waiting import Deadline

KEEP_LINES = 400
"""Last lines of each node that are kept in memory, to find out why it failed."""
_ANSWER_S = 15.0
"""Time for a host to say how its job is."""
_TRY_EVERY_S = 0.5
_LOOK_S = 0.1
"""How often to look whether the user wants to stop; output and ends are noticed at once."""
_BAR_S = 5.0
"""How often to show a progress bar that has moved."""

Reconnect = Callable[[str, float], Connection]
"""Logs in again to the host of a node, within so many seconds; raises HostError."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """One node of the run, and what is known of it."""

    name: str
    """`node-00`."""
    address: str
    """Its host."""
    run_dir: str
    connection: Connection
    log: Path
    """Its log on this side, byte for byte."""
    offset: int = 0
    """Bytes of the log that have come."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=KEEP_LINES))
    ended: bool = False
    code: int | None = None
    """Exit code of its script, where it has one."""
    failure: str = ""
    """What is wrong with it, in a phrase; empty while nothing is."""
    cut: bool = False
    """Whether the connection to its host is lost; it is being tried until `lost` is set."""
    lost: HostError | None = None
    """Why its host cannot be reached, once that is given up."""
    trouble_at: float | None = None
    """Moment at which its end or the loss of its connection was noticed."""
    _lines: ShownLines = field(default_factory=ShownLines)
    _stream: Stream | None = None
    _answers: list[_Answer] = field(default_factory=list)
    _empty: int = 0
    """Streams in a row that ended without a byte."""
    _file: BinaryIO | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.ended or self.lost is not None

    @property
    def failed(self) -> bool:
        """Whether the run cannot succeed any more because of it."""
        return bool(self.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What became of a node whose stream ended."""

    connection: Connection | None = None
    stream: Stream | None = None
    """It goes on here."""
    state: NodeState | None = None
    lost: HostError | None = None


class Watch:
    """Follows the nodes of a run from one thread. Nothing is stopped here."""

    def __init__(
        self,
        nodes: Sequence[Watched],
        *,
        tell: Tell,
        reconnect: Reconnect,
        reconnect_s: float,
        on_line: Callable[[str, str], None] = lambda node, line: None,
        note_after_s: float = 60.0,
    ) -> None:
        """Begin to follow all nodes. `on_line` is called with each line and the name of its node."""
        self.nodes = list(nodes)
        self._tell = tell
        self._reconnect = reconnect
        self._reconnect_s = reconnect_s
        self._on_line = on_line
        self._bell = Bell()
        self._bar_at = time.monotonic()
        self._note_after_s = note_after_s
        self._waiting_since: float | None = None
        self._closed = False
        self.stopping = False
        """Whether nodes that end from now on do so because they were told to."""
        for node in self.nodes:
            node._file = _open(node, tell)
            self._ask(node, node.connection)

    def until(self, done: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Watch until `done`, all nodes are over, or the deadline. Whether it was `done`."""
        deadline = Deadline(deadline_s) if deadline_s is not None else None
        while True:
            self._look()
            if done():
                return True
            if all(node.over for node in self.nodes) or (deadline and deadline.left_s <= 0):
                return False
            self._bell.listen(min(_LOOK_S, deadline.left_s) if deadline else _LOOK_S)

    def close(self) -> None:
        """Follow no more. The job goes on, where it does."""
        self._closed = True
        for node in self.nodes:
            if node._stream is not None:
                node._stream.close()
            if node._file is not None:
                node._file.close()
                node._file = None

    def _look(self) -> None:
        now = time.monotonic()
        bars = now - self._bar_at > _BAR_S
        if bars:
            self._bar_at = now
        for node in self.nodes:
            for item in node._stream.poll() if node._stream is not None else ():
                if isinstance(item, Ended):
                    node._stream = None
                    self._stream_ended(node, item)
                elif item.source == "stdout":
                    self._take(node, item)
            while node._answers:
                self._answered(node, node._answers.pop())
            if bars and (bar := node._lines.bar()) is not None:
                self._tell(Event(kind="bar", node=node.name, text=bar))
                self._on_line(node.name, bar)
        self._tell_who_is_waited_for(now)

    def _take(self, node: Watched, chunk: Chunk) -> None:
        node.offset += len(chunk.data)
        node._empty = 0
        if node._file is not None:
            try:
                node._file.write(chunk.data)
                node._file.flush()
            except OSError as error:
                node._file = None
                text = f"its log is not kept here any more, {node.log}: {error.strerror}; its host has all of it"
                self._tell(Event(kind="note", node=node.name, text=text))
        self._show(node, node._lines.feed(chunk.data))

    def _show(self, node: Watched, lines: Sequence[str]) -> None:
        for line in lines:
            node.tail.append(line)
            self._tell(Event(kind="line", node=node.name, text=line))
            self._on_line(node.name, line)

    def _stream_ended(self, node: Watched, end: Ended) -> None:
        node.trouble_at = time.monotonic()
        node._empty += 1
        if end.lost is not None:
            node.cut = True
            text = f"connection to {node.address} lost; trying for {self._reconnect_s:g} s, the job goes on there"
            self._tell(Event(kind="connection", node=node.name, text=text, data={"state": "lost"}))
        self._ask(node, None if end.lost is not None else node.connection)

    def _ask(self, node: Watched, connection: Connection | None) -> None:
        """Find out, in a thread, how the node is, and follow it on. Without a connection make one."""
        threading.Thread(target=self._find_out, args=(node, connection), daemon=True).start()

    def _find_out(self, node: Watched, connection: Connection | None) -> None:
        # A job that runs while its log cannot be followed is asked for now and then, not all the time.
        time.sleep(min(_TRY_EVERY_S * max(0, node._empty - 1), 5.0))
        deadline = Deadline(self._reconnect_s)
        answer = None
        while answer is None and not self._closed:
            try:
                if connection is None:
                    connection = self._reconnect(node.name, max(1.0, deadline.left_s))
                state = node_state(connection, node.run_dir, deadline_s=_ANSWER_S)
                stream = None
                if state.state == "running" or state.log_bytes > node.offset:
                    stream = follow_node(connection, node.run_dir, offset=node.offset)
                    stream.ring(self._bell)
                answer = _Answer(connection=connection, state=state, stream=stream)
            except HostError as error:
                if connection is not None:
                    connection.close()
                    connection = None
                if deadline.left_s <= 0:
                    answer = _Answer(lost=error)
                else:
                    time.sleep(min(_TRY_EVERY_S, deadline.left_s))
        if answer is not None:
            node._answers.append(answer)
            self._bell.set()

    def _answered(self, node: Watched, answer: _Answer) -> None:
        if answer.connection is not None:
            node.cut = False
            if answer.connection is not node.connection:
                node.connection.close()
                node.connection = answer.connection
                text = f"connected to {node.address} again, and nothing was missed"
                self._tell(Event(kind="connection", node=node.name, text=text, data={"state": "back"}))
            if answer.stream is not None:
                node.trouble_at = None
                node._stream = answer.stream
                self._bell.set()
                return
        state = answer.state
        self._show(node, node._lines.end())
        if state is None:
            node.lost, node.cut = answer.lost, True
            node.failure = f"its host did not come back within {self._reconnect_s:g} s"
            text = f"{node.failure}: {answer.lost}"
            self._tell(Event(kind="failure", node=node.name, text=text, data={"host": node.address}))
            return
        node.ended, node.code = True, state.code
        node.trouble_at = node.trouble_at or time.monotonic()
        if self.stopping:
            text = "stopped" if state.code is None else f"stopped, exit code {state.code}"
        else:
            node.failure = _failure(state)
            text = node.failure or "ended with exit code 0"
        self._tell(Event(kind="ended", node=node.name, text=text, data={"code": state.code, "host": node.address}))

    def _tell_who_is_waited_for(self, now: float) -> None:
        """Once, when some nodes have ended well and others go on for long."""
        over = [node.name for node in self.nodes if node.over]
        if not over or len(over) == len(self.nodes):
            return
        if self._waiting_since is None:
            self._waiting_since = now
        elif 0 < self._note_after_s < now - self._waiting_since:
            self._note_after_s = 0
            running = [node.name for node in self.nodes if not node.over]
            text = f"{', '.join(over)} ended {now - self._waiting_since:.0f} s ago; waiting for {', '.join(running)}"
            self._tell(Event(kind="note", text=text))


def _failure(state: NodeState) -> str:
    if state.state == "ended":
        if state.code is None:
            return "was ended by a signal"
        killed = f" (signal {state.code - 128})" if 128 < state.code < 160 else ""
        return f"ended with exit code {state.code}{killed}" if state.code else ""
    if state.state == "rebooted":
        return "its machine was started again meanwhile"
    if state.state == "never-started":
        return "was never started"
    return "its processes are gone, without an exit code: somebody killed them"


def _open(node: Watched, tell: Tell) -> BinaryIO | None:
    try:
        return node.log.open("ab")
    except OSError as error:
        text = f"its log is not kept here, {node.log}: {error.strerror}; its host has it"
        tell(Event(kind="note", node=node.name, text=text))
        return None
