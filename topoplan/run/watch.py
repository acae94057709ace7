"""Watching the nodes of a run: their output as it comes, what they end with, and who failed first.

The job lives on its hosts, in sessions of its own; this only looks. So a connection that is lost is made again, for as
long as this lives, and the log goes on at the byte where it stopped: a cut that heals loses nothing, and what ended
meanwhile is found by the host's own record of it. Not seeing a host is no failure (`topoplan.run.sight`); only who
wants that gives it up after a time. A run can be watched from its start, or from somewhere in the middle.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from topoplan.errors import HostError
from topoplan.remote.connection import Bell, Connection, Ended, Stream
from topoplan.remote.fanout import run_on_all
from topoplan.remote.ssh import CONNECT_S
from topoplan.remote.waiting import Call, Deadline
from topoplan.run.events import Event, Tell
from topoplan.run.log_copy import LogCopy
from topoplan.run.node import NodeState, directory_words, follow_node, node_state, tail_offsets
from topoplan.run.progress import Progress, Status
from topoplan.run.record import NodeRecord, Started
from topoplan.run.shown import KEEP_LINES, ShownLines, Tail
from topoplan.run.sight import AGAINST_US, Sight, age
from topoplan.run.silence import Silence
from topoplan.run.stacks import elsewhere, node_stacks, stack_lines

MOST_BEHIND_BYTES = 64 * 2**20
"""A copy that lacks more of what is past is not continued: who comes back to a run wants to see it now."""
_ANSWER_S = 15.0
"""Time for a host to say how its job is."""
_EMPTY_EVERY_S = 0.5
_TRY_S = 5.0
"""The first attempt at a host that is gone may take so long, and each next twice as long up to `CONNECT_S`."""
_PAUSE_S = 0.5
"""Between attempts; it grows, and differs from host to host by chance. When one host is back, all are tried at once."""
_PAUSE_AT_MOST_S = 10.0
_PAUSE_REFUSED_S = 60.0
"""Between attempts at a host that answers and does not let us in: some shut out who tries too often."""
_STACKS_S = 30.0
"""Time for a host to look where the ranks of its job are."""
_STARTING_S = 3.0
"""Time for a host to start what it was told to before the connection was lost."""
_LOOK_S = 0.1
"""How often to look whether the user wants to stop; output and ends are noticed at once."""
_BAR_S = 5.0
"""How often to show a progress bar that has moved."""

Reconnect = Callable[[str, float], Connection]
"""Logs in again to the host of a node, within so many seconds; raises HostError."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """One node of the run, and what is known of it."""

    node: int
    """Rank among the nodes."""
    name: str
    """`node-00`."""
    address: str
    """Its host."""
    run_dir: str
    started: Started | None = None
    """What its host said when it started it, where that is known."""
    connection: Connection | None
    """None where there is none yet, or `lost` is set from the start."""
    log: Path | None
    """Its log on this side, byte for byte, unless another process keeps it; None: it is not kept."""
    tail_lines: int | None = None
    """So many lines of the past are shown; None: all."""
    offset: int = 0
    """Bytes of the log that have come."""
    tail: Tail = field(default_factory=Tail)
    state: NodeState | None = None
    """What its host said last."""
    starting: bool = False
    """Whether its start may still be under way, as far as is known: the connection was lost meanwhile."""
    ended: bool = False
    """Whether it has, and all that it wrote has come."""
    code: int | None = None
    """Exit code of its script, where it has one."""
    failure: str = ""
    """What is wrong with it, in a phrase; empty while nothing is."""
    unseen: HostError | None = None
    """Why its host cannot be seen now, or could not to the end; it is being tried until `lost` is set."""
    unseen_at: float | None = None
    """Moment from which on that is so."""
    lost: HostError | None = None
    """The same, once it is given up."""
    not_kept: str = ""
    """Why its log is not kept here to its end, where it was to be."""
    trouble_at: float | None = None
    """Moment of its end, or at which that or the loss of its connection was noticed."""
    _lines: ShownLines = field(default_factory=ShownLines)
    _stream: Stream | None = None
    _answers: deque[_Answer] = field(default_factory=deque)
    _empty: int = 0
    """Streams in a row that ended without a byte."""
    _copy: LogCopy | None = None
    _begun: bool = False
    _shown_from: int = 0
    """In the log: what is before is only kept."""
    _heard_at: float = field(default_factory=time.monotonic)
    """Moment at which its last output came."""
    _last_byte: int | None = None
    """Size of the log when its end was first seen; what the job has left running may write on."""

    @classmethod
    def of(
        cls, place: NodeRecord, connection: Connection | None, *, log: Path | None, tail_lines: int | None = None
    ) -> Self:
        """A node of the record of a run."""
        return cls(
            node=place.node,
            name=place.label,
            address=place.address,
            run_dir=place.run_dir,
            started=place.started,
            connection=connection,
            log=log,
            tail_lines=tail_lines,
        )

    @property
    def over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.ended or self.lost is not None

    @property
    def failed(self) -> bool:
        """Whether the run cannot succeed any more because of it."""
        return bool(self.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """Where in a log to begin."""

    shown_from: int
    offset: int
    """What comes from the host begins here."""
    local: bytes = b""
    """What is before that and of interest, from the copy."""
    no_copy: str = ""
    """Why the copy cannot be continued; empty where it can be, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What became of a node whose stream ended."""

    unseen: HostError | None = None
    """It cannot be asked, and is tried again; else the rest is there."""
    connection: Connection | None = None
    stream: Stream | None = None
    """It goes on here."""
    state: NodeState | None = None
    begin: _Begin | None = None
    """Only of the first."""


class Watch:
    """Follows the nodes of a run from one thread. Nothing is stopped here."""

    def __init__(
        self,
        nodes: Sequence[Watched],
        *,
        tell: Tell,
        reconnect: Reconnect,
        lost_after_s: float | None = None,
        progress: Progress | None = None,
        ranks_per_node: int | None = None,
        hang_after_s: float | None = None,
        on_data: Callable[[str, bytes], None] | None = None,
        note_after_s: float = 60.0,
    ) -> None:
        """Begin to follow all nodes that are not `over`.

        A host that was not seen for `lost_after_s`, while another one was, is given up: its node has failed. None is
        never. `progress` reads their lines. After `hang_after_s` without a step the run `hangs`. With `on_data` the
        output is given to that as it is, with the name of its node, and no events are made of it.
        """
        self.nodes = list(nodes)
        self._tell = tell
        self._reconnect = reconnect
        self._lost_after_s = lost_after_s
        self._sight = Sight({node.name: node.address for node in self.nodes}, tell)
        self._one_is_back = threading.Condition()
        self._progress = progress or Progress()
        self.silence = Silence(self._progress, ranks_per_node=ranks_per_node)
        self._hang_after_s = hang_after_s
        self.stacks: dict[int, list[str]] = {}
        """Where the ranks were when the run had gone quiet, as far as their hosts can say."""
        self._asks_stacks: Call[None] | None = None
        self._on_data = on_data
        self._bell = Bell()
        self._bar_at = time.monotonic()
        self._note_after_s = note_after_s
        self._closed = False
        self.stopping = False
        """Whether nodes that end from now on do so because they were told to."""
        for node in self.nodes:
            if not node.over:
                node._copy = _open(node, tell)
                if node.unseen is not None:
                    self._cannot_see(node, node.unseen)
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

    @property
    def is_blind(self) -> bool:
        """Whether no host at all has been seen for as long as is waited for one."""
        return self._lost_after_s is not None and self._sight.offline_s >= self._lost_after_s

    @property
    def hangs(self) -> bool:
        """Whether no step has come for as long as is waited for one, and the ranks were looked at."""
        quiet = self._hang_after_s is not None and self.silence.quiet_s >= self._hang_after_s
        return quiet and self._asks_stacks is not None and self._asks_stacks.done.is_set()

    @property
    def status(self) -> Status:
        """Where training is."""
        return self._progress.status()

    def close(self) -> None:
        """Follow no more. The job goes on, where it does."""
        self._closed = True
        self.hurry()
        for node in self.nodes:
            if node._stream is not None:
                node._stream.close()
            for answer in node._answers:
                if answer.connection is not None and answer.connection is not node.connection:
                    answer.connection.close()
            if node._copy is not None:
                node._copy.close()
                node._copy = None

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
                    self._take(node, item.data)
            while node._answers:
                self._answered(node, node._answers.popleft())
            if bars and (bar := node._lines.bar()) is not None:
                self._tell(Event(kind="bar", node=node.name, text=bar))
                self._read(node, f"{bar}\n")
        self._look_for_the_unseen(now)
        self._tell_who_is_waited_for(now)
        self._look_for_silence()

    def _look_for_the_unseen(self, now: float) -> None:
        """Tell of them, and give up those whose time is over."""
        if not any(node.unseen and not node.over for node in self.nodes):
            return
        self._sight.look(
            any_seen=any(node.connection is not None and node.connection.is_alive for node in self.nodes),
            running={node.name: now - node._heard_at for node in self.nodes if not node.over and not node.unseen},
        )
        for node in self.nodes:
            unseen_s = self._sight.unseen_s(node.name)
            if self._lost_after_s is None or node.unseen is None or node.over or unseen_s < self._lost_after_s:
                continue
            node.lost = node.unseen
            node.failure = f"its host was not seen for {age(self._lost_after_s)}"
            node.trouble_at = node.unseen_at
            self._sight.drop(node.name)
            self._end_lines(node)
            text = f"{node.failure}: {node.lost}"
            self._tell(Event(kind="failure", node=node.name, text=text, data={"host": node.address}))

    def _look_for_silence(self) -> None:
        """Tell of it, and ask for the stacks. Nobody is heard of who is not seen, or is being stopped."""
        if self._on_data is not None or self.stopping or any(node.unseen and not node.over for node in self.nodes):
            self.silence.alive()
            return
        if (event := self.silence.look(at_most_s=self._hang_after_s)) is not None:
            self._tell(event)
            self._asks_stacks = Call(self._ask_for_stacks)
        elif self.stacks and not self.silence.is_told:
            self.stacks = {}

    def _ask_for_stacks(self) -> None:
        asked = {node.name: node for node in self.nodes if not node.over and node.connection is not None}
        found = run_on_all(
            {name: node.connection for name, node in asked.items() if node.connection is not None},
            lambda name, connection: node_stacks(
                connection, asked[name].run_dir, started=asked[name].started, deadline_s=_STACKS_S
            ),
            deadline_s=_STACKS_S + 1,
        )
        self.stacks = {rank: one for some in found.values() if isinstance(some, dict) for rank, one in some.items()}
        if self.stacks and not self._closed:
            text = "\n  ".join(["where the ranks are, as py-spy says:", *stack_lines(self.stacks)])
            self._tell(Event(kind="stacks", text=text, data={"ranks": self.stacks, "apart": elsewhere(self.stacks)}))
        self._bell.set()

    def _take(self, node: Watched, data: bytes) -> None:
        node._empty = 0
        node._heard_at = time.monotonic()
        if node._copy is not None:
            try:
                node._copy.add(data)
            except OSError as error:
                self._keep_no_copy(node, f"{error.strerror}; its host has all of it")
        self._show(node, data)

    def _show(self, node: Watched, data: bytes) -> None:
        """What comes next in the log."""
        past = data[: max(0, node._shown_from - node.offset)]
        node.offset += len(data)
        if self._on_data is not None:
            self._on_data(node.name, data)
            return
        if past:
            self._read(node, node._lines.feed(past), past=True)
            if node.offset >= node._shown_from and (status := self._progress.status()).step:
                self._tell_status(node, status)
        self._show_lines(node, node._lines.feed(data[len(past) :]))

    def _show_lines(self, node: Watched, lines: str) -> None:
        if lines:
            self._tell(Event(kind="output", node=node.name, text=lines[:-1]))
            self._read(node, lines)

    def _read(self, node: Watched, lines: str, *, past: bool = False) -> None:
        """Keep what may be asked for, and look for where training is."""
        node.tail.add(lines)
        status = self._progress.feed(node.node, lines, time.monotonic())
        self.silence.heard(node.node, node.name, lines, past=past)
        if status is not None and not past:
            self._tell_status(node, status)

    def _tell_status(self, node: Watched, status: Status) -> None:
        data = {"status": dataclasses.asdict(status)}
        self._tell(Event(kind="progress", text="", node=node.name, status=status, data=data))

    def _keep_no_copy(self, node: Watched, why: str) -> None:
        if node._copy is not None:
            node._copy.close()
            node._copy = None
        node.not_kept = why
        self._tell(Event(kind="note", node=node.name, text=f"its log is not kept here any more, {node.log}: {why}"))

    def _stream_ended(self, node: Watched, end: Ended) -> None:
        node.trouble_at = time.monotonic()
        node._empty += 1
        if end.lost is not None:
            self._cannot_see(node, end.lost)
        self._ask(node, None if end.lost is not None else node.connection)

    def _cannot_see(self, node: Watched, why: HostError) -> None:
        node.unseen = why
        node.unseen_at = node.unseen_at or time.monotonic()
        self._sight.lose(node.name, why)

    def hurry(self) -> None:
        """Try all that cannot be seen at once: what kept us from one may have kept us from all."""
        with self._one_is_back:
            self._one_is_back.notify_all()

    def _ask(self, node: Watched, connection: Connection | None) -> None:
        """Find out, in a thread, how the node is, and follow it on. Without a connection make one."""
        threading.Thread(target=self._find_out, args=(node, connection), daemon=True).start()

    def _find_out(self, node: Watched, connection: Connection | None) -> None:
        # A job that runs while its log cannot be followed is asked for now and then, not all the time.
        time.sleep(min(_EMPTY_EVERY_S * max(0, node._empty - 1), 5.0))
        attempt_s, pause_s = _TRY_S, _PAUSE_S
        while not self._closed and node.lost is None:
            try:
                if connection is None:
                    connection = self._reconnect(node.name, attempt_s)
                if not self._closed and node.lost is None:
                    self._answer(node, self._how_it_is(node, connection))
                    return
            except HostError as error:
                if connection is not None:
                    connection.close()
                    connection = None
                self._answer(node, _Answer(unseen=error))
                with self._one_is_back:
                    refused = error.problem in AGAINST_US
                    self._one_is_back.wait(_PAUSE_REFUSED_S if refused else pause_s * random.uniform(0.7, 1.3))
            attempt_s, pause_s = min(2 * attempt_s, CONNECT_S), min(1.6 * pause_s, _PAUSE_AT_MOST_S)
        if connection is not None and connection is not node.connection:
            connection.close()

    def _how_it_is(self, node: Watched, connection: Connection) -> _Answer:
        """Of a node whose host answers. Raises HostError where that does not do what it should."""
        state = node_state(connection, node.run_dir, started=node.started, deadline_s=_ANSWER_S)
        if state.state == "never-started" and node.starting:
            time.sleep(_STARTING_S)
            state = node_state(connection, node.run_dir, started=node.started, deadline_s=_ANSWER_S)
        begin = None if node._begun else self._begin(node, connection, state)
        offset = node.offset if begin is None else begin.offset
        stream = None
        if state.state != "running" and node._last_byte is None:
            node._last_byte = state.log_bytes
        if state.state == "running" or offset < (node._last_byte or 0):
            stream = follow_node(connection, node.run_dir, offset=offset)
            stream.ring(self._bell)
        return _Answer(connection=connection, state=state, begin=begin, stream=stream)

    def _answer(self, node: Watched, answer: _Answer) -> None:
        node._answers.append(answer)
        self._bell.set()

    def _begin(self, node: Watched, connection: Connection, state: NodeState) -> _Begin:
        """Where to begin, so that what is wanted of the past comes and the copy has no gap."""
        shown_from = past_from = 0
        if node.tail_lines is not None:
            lines = (node.tail_lines, node.tail_lines if self._on_data else max(KEEP_LINES, node.tail_lines))
            shown_from, past_from = tail_offsets(
                connection, node.run_dir, lines, log_bytes=state.log_bytes, deadline_s=_ANSWER_S
            )
        copy = node._copy
        if copy is None:
            return _Begin(shown_from=shown_from, offset=past_from)
        try:
            copied = copy.size_bytes
            lacking = state.log_bytes - copied
            if lacking < 0:
                why = "it has more than the log on its host"
            elif node.tail_lines is not None and lacking > MOST_BEHIND_BYTES:
                why = f"{lacking / 2**20:,.0f} MiB are missing; `topoplan runs logs` has them"
            else:
                local = copy.read(past_from) if copied > past_from else b""
                return _Begin(shown_from=shown_from, offset=copied, local=local)
        except OSError as error:
            why = f"{error.strerror}; its host has it"
        return _Begin(shown_from=shown_from, offset=past_from, no_copy=why)

    def _answered(self, node: Watched, answer: _Answer) -> None:
        state, connection = answer.state, answer.connection
        if node.over or state is None or connection is None:
            if connection is not None and connection is not node.connection:
                connection.close()
            if answer.unseen is not None and not node.over:
                node.trouble_at = node.trouble_at or time.monotonic()
                self._cannot_see(node, answer.unseen)
            return
        unseen_at, node.unseen, node.unseen_at = node.unseen_at, None, None
        was_mute = node.state is not None and node.state.is_mute
        node.state, node.started = state, node.started or state.started
        if connection is not node.connection:
            if node.connection is not None:
                node.connection.close()
            node.connection = connection
        if unseen_at is not None:
            self._sight.see(node.name)
            self.hurry()
        if answer.begin is not None:
            node._begun, node._shown_from = True, answer.begin.shown_from
            node.offset = answer.begin.offset - len(answer.begin.local)
            if answer.begin.no_copy:
                self._keep_no_copy(node, answer.begin.no_copy)
            self._show(node, answer.begin.local)
        node.code = state.code
        is_over = state.state != "running"
        if state.is_mute and not was_mute and not is_over:
            text = f"{directory_words(state.directory)}: its job goes on, and what it writes is not seen"
            self._tell(Event(kind="note", node=node.name, text=text, data={"directory": state.directory}))
        node.trouble_at = _ended_at(state, time.monotonic(), node.trouble_at, unseen_at) if is_over else None
        if answer.stream is not None:
            node._stream = answer.stream
            self._bell.set()
            return
        self._end_lines(node)
        node.ended = True
        if self.stopping:
            text = "stopped" if state.code is None else f"stopped, exit code {state.code}"
        else:
            node.failure = how_it_failed(state)
            text = node.failure or "ended with exit code 0"
        self._tell(Event(kind="ended", node=node.name, text=text, data={"code": state.code, "host": node.address}))

    def _end_lines(self, node: Watched) -> None:
        """Show what has come of a last line that is not whole."""
        rest = node._lines.end()
        if node.offset > node._shown_from:
            self._show_lines(node, rest)
        else:
            node.tail.add(rest)

    def _tell_who_is_waited_for(self, now: float) -> None:
        """Once, when some nodes have ended well and others go on for long."""
        over = [node for node in self.nodes if node.ended]
        running = [node.name for node in self.nodes if not node.over]
        if not over or not running or self._note_after_s <= 0:
            return
        ago_s = now - max(node.trouble_at or now for node in over)
        if ago_s > self._note_after_s:
            self._note_after_s = 0
            names = ", ".join(node.name for node in over)
            text = f"{names} ended {ago_s:.0f} s ago; waiting for {', '.join(running)}"
            self._tell(Event(kind="note", text=text))


def failed_at(nodes: Iterable[Watched]) -> float:
    """Moment of the first failure, of `time.monotonic`. Raises ValueError where none has failed."""
    return min(node.trouble_at or 0.0 for node in nodes if node.failed)


def _ended_at(state: NodeState, now: float, noticed: float | None, unseen_at: float | None) -> float:
    """Moment of an end. One that came unseen is as old as its host says; others were noticed, or are of before."""
    if state.ended_s_ago is None:
        return noticed or now
    by_host = now - state.ended_s_ago
    return by_host if noticed is None or unseen_at is not None else min(noticed, by_host)


def not_kept(nodes: Iterable[Watched]) -> str:
    """Why logs are not kept here to their end: one line, empty where all are."""
    lacking = (node for node in nodes if node.not_kept)
    return "; ".join(f"the log of {node.name} is not kept to its end: {node.not_kept}" for node in lacking)


def how_it_failed(state: NodeState) -> str:
    """In a phrase; empty where it ended well."""
    if state.stopped:
        return f"was ended on its host, as {state.stopped}"
    if state.state == "ended":
        if state.code is None:
            return "was ended by a signal"
        killed = f" (signal {state.code - 128})" if 128 < state.code < 160 else ""
        return f"ended with exit code {state.code}{killed}" if state.code else ""
    if state.state == "rebooted":
        return "its machine was started again meanwhile"
    if state.state == "never-started":
        return "was never started"
    if state.is_mute:
        return "its processes are gone, and so is its run directory: how it ended is not known"
    return "its processes are gone, without an exit code: somebody killed them"


def _open(node: Watched, tell: Tell) -> LogCopy | None:
    if node.log is None:
        return None
    try:
        return LogCopy.open(node.log)
    except OSError as error:
        node.not_kept = f"{error.strerror}; its host has it"
        text = f"its log is not kept here, {node.log}: {node.not_kept}"
        tell(Event(kind="note", node=node.name, text=text))
        return None
