"""Watch the nodes of a run: their output as it arrives, their exit codes, and which one failed first.

The job runs on its hosts, in sessions of its own, and this module only observes it. A lost connection is therefore
retried for as long as the watch lives, and the log resumes at the byte where it stopped: a cut that heals loses
nothing, and a job that ended meanwhile is found by its host's own record of the end. Losing sight of a host is not a
failure (`topoplan.run.reachability`); a host is given up on after a time only if the caller asks for that. A run can be
watched from its start or from any later moment.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from topoplan.errors import HostError
from topoplan.remote.connection import Bell, Connection, StreamEnd
from topoplan.remote.fanout import run_on_all
from topoplan.remote.waiting import Call, Deadline
from topoplan.run.drift import DriftDetector
from topoplan.run.events import Event, Tell
from topoplan.run.following import FollowedLog, JobFinder, LogCopy, NodeAnswer, Reconnect
from topoplan.run.node import NodeState, directory_problem
from topoplan.run.progress import Progress, Status
from topoplan.run.reachability import Reachability, duration_text
from topoplan.run.silence import SilenceDetector
from topoplan.run.stacks import OBSERVED_S, inspect_ranks, outlying_ranks, stack_lines, with_missing_ranks
from topoplan.run.watched import WatchedNode, end_time_s, failure_phrase
from topoplan.trainers.log import may_match

_STACKS_S = 30.0
"""Timeout for a host to collect the stacks of its ranks."""
_WRITES_BYTES_PER_S = 2**18
"""A job that writes more than this but makes no steps is saving a checkpoint or loading its data: it does not hang."""
_LOOK_S = 0.1
"""Interval at which to check whether the user wants to stop; output and ends are noticed immediately."""
_STREAMS_BYTES, _GATHER_S = 16 * 1024, 0.005
"""After a look that took this much, output is left to gather: one large piece costs less than many small ones."""
_BAR_S = 5.0
"""Interval at which to show a progress bar that has moved."""


class Watch:
    """Follows the nodes of a run from one thread; it stops nothing."""

    def __init__(
        self,
        nodes: Sequence[WatchedNode],
        *,
        tell: Tell,
        reconnect: Reconnect,
        lost_after_s: float | None = None,
        progress: Progress | None = None,
        drift: DriftDetector | None = None,
        ranks_per_node: int | None = None,
        hang_after_s: float | None = None,
        on_data: Callable[[str, bytes], None] | None = None,
        note_after_s: float = 60.0,
    ) -> None:
        """Begin to follow all nodes that are not `is_over`.

        A host that has been unreachable for `lost_after_s`, while another one has not, is given up on, and its node has
        failed; None means never. `progress` reads the nodes' lines, and `drift` compares them with the prediction.
        After `hang_after_s` without a step the run `has_hung`. With `on_data` the raw output is passed to that function
        together with the name of its node, and no events are made of it.
        """
        self.nodes = list(nodes)
        self._tell = tell
        self._lost_after_s = lost_after_s
        self._reachability = Reachability({node.name: node.address for node in self.nodes}, tell)
        self._progress = progress or Progress()
        self._drift = drift or DriftDetector(self._progress)
        self.silence = SilenceDetector(self._progress, ranks_per_node=ranks_per_node)
        self._ranks = ranks_per_node or 0
        self._hang_after_s = hang_after_s
        self.stacks: dict[int, list[str]] = {}
        """Stacks of the ranks when the run had gone quiet, as far as their hosts can tell."""
        self._asks_stacks: Call[None] | None = None
        self._writer = ""
        """When the run has gone quiet, the node that is still writing files."""
        self._on_data = on_data
        self._bell = Bell()
        self._reconnect = reconnect
        self._finder = JobFinder(reconnect, self._bell, is_raw=on_data is not None)
        self._bar_at = time.monotonic()
        self._note_after_s = note_after_s
        self._closed = False
        self.stopping = False
        """Whether nodes that end from now on do so because they were told to."""
        self._followed = [FollowedLog(node, _open(node, tell)) for node in self.nodes if not node.is_over]
        for one in self._followed:
            if one.node.unreachable is not None:
                self._mark_unreachable(one.node, one.node.unreachable)
            self._finder.ask(one, one.node.connection)

    def until(self, done: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Watch until `done`, until all nodes are over, or until the deadline; return whether it was `done`."""
        deadline = Deadline(deadline_s) if deadline_s is not None else None
        while True:
            taken_bytes = self._look()
            if done():
                return True
            if all(node.is_over for node in self.nodes) or (deadline and deadline.left_s <= 0):
                return False
            self._bell.listen(min(_LOOK_S, deadline.left_s) if deadline else _LOOK_S)
            if taken_bytes >= _STREAMS_BYTES:
                time.sleep(_GATHER_S)

    @property
    def is_offline(self) -> bool:
        """Whether no host at all has been seen for `lost_after_s`."""
        return self._lost_after_s is not None and self._reachability.offline_s >= self._lost_after_s

    @property
    def has_hung(self) -> bool:
        """Whether no step has come for `hang_after_s`, the ranks' stacks were collected, and no node is writing."""
        if self._hang_after_s is None or self.silence.quiet_s < self._hang_after_s or not self.silence.is_reported:
            return False  # the stacks collected earlier belong to an earlier silence
        return self._asks_stacks is not None and self._asks_stacks.done.is_set() and not self._writer

    @property
    def status(self) -> Status:
        """Current state of the training."""
        return self._progress.status()

    def retry_now(self) -> None:
        """Retry all hosts that cannot be seen without further delay."""
        self._finder.retry_now()

    def close(self) -> None:
        """Stop following. Jobs that are running go on."""
        self._closed = True
        self._finder.close()
        for one in self._followed:
            if one.stream is not None:
                one.stream.close()
            for answer in one.answers:
                if answer.connection is not None and answer.connection is not one.node.connection:
                    answer.connection.close()
            if one.copy is not None:
                one.copy.close()
                one.copy = None

    def _look(self) -> int:
        """Take what has come, and look after all else; return the bytes of output."""
        now, taken_bytes = time.monotonic(), 0
        bars = now - self._bar_at > _BAR_S
        if bars:
            self._bar_at = now
        for one in self._followed:
            for item in one.stream.poll() if one.stream is not None else ():
                if isinstance(item, StreamEnd):
                    one.stream = None
                    self._stream_ended(one, item)
                elif item.source == "stdout":
                    taken_bytes += len(item.data)
                    self._take(one, item.data)
            while one.answers:
                self._answered(one, one.answers.popleft())
            if bars and (bar := one.lines.bar()) is not None:
                self._tell(Event(kind="bar", node=one.node.name, text=bar))
                self._read(one.node, f"{bar}\n")
        self._look_for_the_unseen(now)
        self._tell_who_is_waited_for(now)
        self._look_for_silence()
        if self._on_data is None and not self.stopping:
            self._drift.look(
                {node.name: node.connection for node in self.nodes if node.connection and not node.is_over}
            )
        return taken_bytes

    def _look_for_the_unseen(self, now: float) -> None:
        """Report the hosts that cannot be seen, and give up on those whose time has run out."""
        if not any(node.unreachable and not node.is_over for node in self.nodes):
            return
        self._reachability.look(
            any_seen=any(node.connection is not None and node.connection.is_alive for node in self.nodes),
            running={
                one.node.name: now - one.heard_at
                for one in self._followed
                if not one.node.is_over and not one.node.unreachable
            },
        )
        for one in self._followed:
            node = one.node
            unreachable_s = self._reachability.unreachable_s(node.name)
            if (
                self._lost_after_s is None
                or node.unreachable is None
                or node.is_over
                or unreachable_s < self._lost_after_s
            ):
                continue
            node.given_up = node.unreachable
            node.failure = f"its host was unreachable for {duration_text(self._lost_after_s)}"
            node.ended_at_s = node.unreachable_since_s
            self._reachability.forget(node.name)
            self._end_lines(one)
            text = f"{node.failure}: {node.given_up}"
            self._tell(Event(kind="failure", node=node.name, text=text, data={"host": node.address}))

    def _look_for_silence(self) -> None:
        """Report a silence and collect the stacks, unless a host is out of sight or the run is being stopped."""
        if (
            self._on_data is not None
            or self.stopping
            or any(node.unreachable and not node.is_over for node in self.nodes)
        ):
            self.silence.restart()
            return
        if (event := self.silence.look(at_most_s=self._hang_after_s)) is not None:
            self._tell(event)
            self._asks_stacks = Call(self._ask_for_stacks)
        elif self._writer:
            text = "is writing files, such as a checkpoint or its data: the run is not hanging"
            self._tell(Event(kind="note", node=self._writer, text=text))
            self._writer = ""
            self.silence.restart()
        if self.stacks and not self.silence.is_reported:
            self.stacks = {}

    def _ask_for_stacks(self) -> None:
        asked = {node.name: node for node in self.nodes if not node.is_over}

        def look(name: str, connection: Connection) -> tuple[dict[int, list[str]], int]:
            node = asked[name]
            try:
                return inspect_ranks(connection, node.run_dir, started=node.started, deadline_s=_STACKS_S)
            except HostError as error:
                if error.problem != "command":
                    raise
                # The host may allow no session besides the one that follows the log (MaxSessions 1).
                with self._reconnect(name, _STACKS_S) as another:
                    return inspect_ranks(another, node.run_dir, started=node.started, deadline_s=_STACKS_S)

        connections = {name: node.connection for name, node in asked.items() if node.connection is not None}
        found = run_on_all(connections, look, deadline_s=2 * _STACKS_S)
        looks = {name: look for name, look in found.items() if not isinstance(look, HostError)}
        self.stacks = {}
        for name, (stacks, _) in looks.items():
            first = asked[name].node * self._ranks
            self.stacks |= with_missing_ranks(stacks, range(first, first + self._ranks))
        written_bytes = {name: written for name, (_, written) in looks.items()}
        most = max(written_bytes, key=lambda name: written_bytes[name], default="")
        if most and written_bytes[most] > _WRITES_BYTES_PER_S * OBSERVED_S:
            self._writer = most
        elif any(self.stacks.values()) and not self._closed:
            text = "\n  ".join(["where the ranks are:", *stack_lines(self.stacks)])
            self._tell(
                Event(kind="stacks", text=text, data={"ranks": self.stacks, "apart": outlying_ranks(self.stacks)})
            )
        self._bell.set()

    def _take(self, one: FollowedLog, data: bytes) -> None:
        one.empty_streams = 0
        one.heard_at = time.monotonic()
        if one.copy is not None:
            try:
                one.copy.add(data)
            except OSError as error:
                self._keep_no_copy(one, f"{error.strerror}; the whole log is on its host")
        self._show(one, data)

    def _show(self, one: FollowedLog, data: bytes) -> None:
        node = one.node
        past = data[: max(0, one.shown_from - node.offset)]
        old = data[len(past) : max(len(past), one.old_until - node.offset)]
        node.offset += len(data)
        if self._on_data is not None:
            self._on_data(node.name, data)
            return
        if past:
            self._read(node, one.lines.feed(past), past=True)
            if node.offset >= one.shown_from and (status := self._progress.status()).step:
                self._tell_status(node, status)
        self._show_lines(node, one.lines.feed(old), old=True)
        self._show_lines(node, one.lines.feed(data[len(past) + len(old) :]))

    def _show_lines(self, node: WatchedNode, lines: str, *, old: bool = False) -> None:
        if lines:
            self._tell(Event(kind="output", node=node.name, text=lines[:-1]))
            self._read(node, lines, old=old)

    def _read(self, node: WatchedNode, lines: str, *, past: bool = False, old: bool = False) -> None:
        """Keep the lines for a later report, and read the state of the training from them.

        `old` lines were written before the host was asked; `past` ones are old too, and are not shown."""
        node.tail.add(lines)
        is_reported = may_match(lines)
        at_s = None if past or old else time.monotonic()
        status = self._progress.feed(node.node, lines, at_s) if is_reported else None
        self.silence.read(node.node, node.name, lines, past=past)
        if is_reported:
            self._drift.read(lines)
        if status is not None and not past:
            self._tell_status(node, status)

    def _tell_status(self, node: WatchedNode, status: Status) -> None:
        data = {"status": dataclasses.asdict(status)}
        self._tell(Event(kind="progress", text="", node=node.name, status=status, data=data))

    def _keep_no_copy(self, one: FollowedLog, why: str) -> None:
        if one.copy is not None:
            one.copy.close()
            one.copy = None
        one.node.log_copy_problem = why
        text = f"the local copy of its log ends here, {one.node.log}: {why}"
        self._tell(Event(kind="note", node=one.node.name, text=text))

    def _stream_ended(self, one: FollowedLog, end: StreamEnd) -> None:
        one.node.ended_at_s = time.monotonic()
        one.empty_streams += 1
        if end.lost is not None:
            self._mark_unreachable(one.node, end.lost)
        self._finder.ask(one, None if end.lost is not None else one.node.connection)

    def _mark_unreachable(self, node: WatchedNode, why: HostError) -> None:
        node.unreachable = why
        node.unreachable_since_s = node.unreachable_since_s or time.monotonic()
        self._reachability.mark_unreachable(node.name, why)

    def _answered(self, one: FollowedLog, answer: NodeAnswer) -> None:
        node, state, connection = one.node, answer.state, answer.connection
        if node.is_over or state is None or connection is None:
            self._not_found(node, answer)
            return
        unreachable_since_s, node.unreachable, node.unreachable_since_s = node.unreachable_since_s, None, None
        was_mute = node.state is not None and node.state.is_unreadable
        node.state, node.started, node.code = state, node.started or state.started, state.code
        one.old_until = state.log_bytes
        if connection is not node.connection:
            if node.connection is not None:
                node.connection.close()
            node.connection = connection
        if unreachable_since_s is not None:
            self._reachability.mark_reachable(node.name)
            self.retry_now()
        if answer.log_start is not None:
            one.has_start, one.shown_from = True, answer.log_start.shown_from
            node.offset = answer.log_start.offset - len(answer.log_start.local)
            if answer.log_start.no_copy:
                self._keep_no_copy(one, answer.log_start.no_copy)
            self._show(one, answer.log_start.local)
        is_over = state.state != "running"
        if state.is_unreadable and not was_mute and not is_over:
            text = f"{directory_problem(state.directory)}: its job goes on, but its log cannot be read"
            self._tell(Event(kind="note", node=node.name, text=text, data={"directory": state.directory}))
        node.ended_at_s = end_time_s(state, time.monotonic(), node.ended_at_s, unreachable_since_s) if is_over else None
        if answer.stream is not None:
            one.stream = answer.stream
            self._bell.set()
        else:
            self._ended(one, state)

    def _not_found(self, node: WatchedNode, answer: NodeAnswer) -> None:
        """Handle an answer without a state, or one for a node that is already over."""
        if answer.connection is not None and answer.connection is not node.connection:
            answer.connection.close()
        if answer.unreachable is not None and not node.is_over:
            node.ended_at_s = node.ended_at_s or time.monotonic()
            self._mark_unreachable(node, answer.unreachable)

    def _ended(self, one: FollowedLog, state: NodeState) -> None:
        """Handle the end of a job whose whole output has arrived."""
        node = one.node
        self._end_lines(one)
        node.ended = True
        if self.stopping:
            text = "stopped" if state.code is None else f"stopped, exit code {state.code}"
        else:
            node.failure = failure_phrase(state)
            text = node.failure or "ended with exit code 0"
        if not node.failed:
            self.silence.restart()  # the node may have worked until now, so the others get the full time from here
        self._tell(Event(kind="ended", node=node.name, text=text, data={"code": state.code, "host": node.address}))

    def _end_lines(self, one: FollowedLog) -> None:
        rest = one.lines.end()
        if one.node.offset > one.shown_from:
            self._show_lines(one.node, rest)
        else:
            one.node.tail.add(rest)

    def _tell_who_is_waited_for(self, now: float) -> None:
        """Report once, when some nodes have ended well and others run on for long."""
        over = [node for node in self.nodes if node.ended]
        running = [node.name for node in self.nodes if not node.is_over]
        if not over or not running or self._note_after_s <= 0:
            return
        ago_s = now - max(node.ended_at_s or now for node in over)
        if ago_s > self._note_after_s:
            self._note_after_s = 0
            names = ", ".join(node.name for node in over)
            text = f"{names} ended {ago_s:.0f} s ago; waiting for {', '.join(running)}"
            self._tell(Event(kind="note", text=text))


def _open(node: WatchedNode, tell: Tell) -> LogCopy | None:
    if node.log is None:
        return None
    try:
        return LogCopy.open(node.log)
    except OSError as error:
        node.log_copy_problem = f"{error.strerror}; the log is on its host"
        text = f"its log is not copied to this machine, {node.log}: {node.log_copy_problem}"
        tell(Event(kind="note", node=node.name, text=text))
        return None
