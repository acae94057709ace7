"""Find a node's job, repeatedly while its host cannot be seen, and follow its log from where it stopped.

Each query to a host runs in a thread of its own; the watching thread takes the answers and is woken for each.

The local copy of a log is the beginning of the host's log, byte for byte. Several processes may watch a run at the same
time, but only the one that holds the lock on the copy appends to it; the system releases the lock when it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from topoplan.errors import HostError
from topoplan.remote.connection import Bell, Connection, Stream
from topoplan.remote.ssh import CONNECT_S
from topoplan.run.node import NodeState, follow_node, node_state, tail_offsets
from topoplan.run.reachability import REFUSALS
from topoplan.run.shown import KEEP_LINES, ShownLines
from topoplan.run.watched import WatchedNode

MOST_BEHIND_BYTES = 64 * 2**20
"""A local copy that lacks more than this is not continued: a user who attaches to a run wants to see it now."""
_ANSWER_S = 15.0
_EMPTY_EVERY_S = 0.5
_TRY_S = 5.0
"""Timeout of the first login attempt to a host that is gone; each further one gets twice as long, up to `CONNECT_S`."""
_PAUSE_S = 0.5
"""First pause between attempts. It grows, with jitter per host; once one host is back, all are retried."""
_PAUSE_AT_MOST_S = 10.0
_PAUSE_REFUSED_S = 60.0
"""Pause between attempts at a host that answers but refuses the login: some ban clients that try too often."""
_STARTING_S = 3.0
"""Time for a host to start a job whose start command was sent before the connection was lost."""

Reconnect = Callable[[str, float], Connection]
"""Logs in again to the host of a node within the given number of seconds; raises HostError."""


class LogCopy:
    """A local copy that this process appends to."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open the copy, creating it if necessary; None if another process appends to it. May raise OSError."""
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        return cls(path, handle)

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the log in the copy."""
        return os.fstat(self._handle).st_size

    def read(self, start: int) -> bytes:
        """Return the bytes of the copy from `start` on."""
        parts = []
        while part := os.pread(self._handle, 2**20, start):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def add(self, data: bytes) -> None:
        """Append to the copy. After an OSError, what was written before is still a beginning of the log."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]

    def close(self) -> None:
        """Let another process append to the copy. May be called repeatedly."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStart:
    """Where to begin in a log."""

    shown_from: int
    offset: int
    """Offset at which the stream from the host begins."""
    local: bytes = b""
    """Earlier bytes of interest, from the local copy."""
    no_copy: str = ""
    """Why the local copy cannot be continued; empty if it can be, or if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What became of a node whose stream ended."""

    unreachable: HostError | None = None
    """Why the host cannot be asked; it will be tried again. If None, the other fields are set."""
    connection: Connection | None = None
    stream: Stream | None = None
    """The stream in which the log goes on."""
    state: NodeState | None = None
    log_start: LogStart | None = None
    """Only in the first answer."""


@dataclass(slots=True)
class FollowedLog:
    """The log of a node, as it is transferred."""

    node: WatchedNode
    copy: LogCopy | None
    lines: ShownLines = field(default_factory=ShownLines)
    stream: Stream | None = None
    answers: deque[NodeAnswer] = field(default_factory=deque)
    shown_from: int = 0
    """Log offset before which bytes are kept but not shown."""
    old_until: int = 0
    """Log offset before which bytes were written before the host was asked last: when they arrive says nothing."""
    has_start: bool = False
    empty_streams: int = 0
    """Number of consecutive streams that ended without a byte."""
    heard_at: float = field(default_factory=time.monotonic)
    """When its last output arrived, in terms of `time.monotonic`."""
    last_byte: int | None = None
    """Size of the log when the job's end was first seen; processes that the job left running may write more."""


class JobFinder:
    """Asks hosts about their jobs, for as long as it is open."""

    def __init__(self, reconnect: Reconnect, bell: Bell, *, is_raw: bool) -> None:
        """`bell` is rung for each answer. `is_raw`: earlier output is wanted only as far as it is shown."""
        self._reconnect, self._bell, self._is_raw = reconnect, bell, is_raw
        self._host_is_back = threading.Condition()
        self._closed = False

    def ask(self, one: FollowedLog, connection: Connection | None) -> None:
        """Find out in a thread how the node is, and go on following it. Without a connection, make a new one."""
        threading.Thread(target=self._ask_until_answered, args=(one, connection), daemon=True).start()

    def retry_now(self) -> None:
        """Retry all hosts that cannot be seen immediately: what kept us from one may have kept us from all."""
        with self._host_is_back:
            self._host_is_back.notify_all()

    def close(self) -> None:
        """Stop asking."""
        self._closed = True
        self.retry_now()

    def _ask_until_answered(self, one: FollowedLog, connection: Connection | None) -> None:
        node = one.node
        # A running job whose log cannot be followed is queried now and then, not all the time.
        time.sleep(min(_EMPTY_EVERY_S * max(0, one.empty_streams - 1), 5.0))
        attempt_s, pause_s = _TRY_S, _PAUSE_S
        while not self._closed and node.given_up is None:
            try:
                if connection is None:
                    connection = self._reconnect(node.name, attempt_s)
                if not self._closed and node.given_up is None:
                    self._put_answer(one, self._query(one, connection))
                    return
            except HostError as error:
                if connection is not None:
                    connection.close()
                    connection = None
                self._put_answer(one, NodeAnswer(unreachable=error))
                with self._host_is_back:
                    refused = error.problem in REFUSALS
                    self._host_is_back.wait(_PAUSE_REFUSED_S if refused else pause_s * random.uniform(0.7, 1.3))
            attempt_s, pause_s = min(2 * attempt_s, CONNECT_S), min(1.6 * pause_s, _PAUSE_AT_MOST_S)
        if connection is not None and connection is not node.connection:
            connection.close()

    def _put_answer(self, one: FollowedLog, answer: NodeAnswer) -> None:
        one.answers.append(answer)
        self._bell.set()

    def _query(self, one: FollowedLog, connection: Connection) -> NodeAnswer:
        """Return the state of a node whose host answers. Raises HostError if a query fails."""
        node = one.node
        state = node_state(connection, node.run_dir, started=node.started, deadline_s=_ANSWER_S)
        if state.state == "never-started" and node.start_later is not None:
            state = self._started_later(node, connection)
        log_start = None if one.has_start else self._log_start(one, connection, state)
        offset = node.offset if log_start is None else log_start.offset
        stream = None
        if state.state != "running" and one.last_byte is None:
            one.last_byte = state.log_bytes
        if state.state == "running" or offset < (one.last_byte or 0):
            stream = follow_node(connection, node.run_dir, offset=offset)
            stream.ring(self._bell)
        return NodeAnswer(connection=connection, state=state, log_start=log_start, stream=stream)

    def _started_later(self, node: WatchedNode, connection: Connection) -> NodeState:
        """Start the job after a pause unless it has started by then; in one run directory nothing is started twice."""
        time.sleep(_STARTING_S)
        with node.start_lock:
            state = node_state(connection, node.run_dir, started=node.started, deadline_s=_ANSWER_S)
            if state.state != "never-started" or node.start_later is None or self._closed:
                return state
            try:
                node.start_later(connection)
            except HostError as error:
                if error.problem != "command":
                    raise
        return node_state(connection, node.run_dir, started=node.started, deadline_s=_ANSWER_S)

    def _log_start(self, one: FollowedLog, connection: Connection, state: NodeState) -> LogStart:
        """Return where to begin, so that the wanted part of the past arrives and the local copy has no gap."""
        node, shown_from, past_from = one.node, 0, 0
        if node.tail_lines is not None:
            lines = (node.tail_lines, node.tail_lines if self._is_raw else max(KEEP_LINES, node.tail_lines))
            shown_from, past_from = tail_offsets(
                connection, node.run_dir, lines, log_bytes=state.log_bytes, deadline_s=_ANSWER_S
            )
        copy = one.copy
        if copy is None:
            return LogStart(shown_from=shown_from, offset=past_from)
        try:
            copied = copy.size_bytes
            lacking = state.log_bytes - copied
            if lacking < 0:
                why = "it has more than the log on its host"
            elif node.tail_lines is not None and lacking > MOST_BEHIND_BYTES:
                why = f"{lacking / 2**20:,.0f} MiB are missing; `topoplan runs logs` has them"
            else:
                local = copy.read(past_from) if copied > past_from else b""
                return LogStart(shown_from=shown_from, offset=copied, local=local)
        except OSError as error:
            why = f"{error.strerror}; the log is on its host"
        return LogStart(shown_from=shown_from, offset=past_from, no_copy=why)
