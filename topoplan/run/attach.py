"""Attach to a running run: watch it as its launch does, from another process.

When a node fails, the others are stopped from here as the launch would do it, which may no longer exist. For users who
want to inspect a hang they are left running and reported; their own hosts end them some time later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from topoplan.bundle.plan_file import RecordedPlan
from topoplan.errors import INTERRUPTED, HostError, TopoplanError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Deadline
from topoplan.run import record as records
from topoplan.run.attempts import is_launch_alive
from topoplan.run.events import Event, Tell, host_failure
from topoplan.run.measurement import planned
from topoplan.run.outcome import targets_of
from topoplan.run.reachability import REFUSALS
from topoplan.run.record import NodeRecord, RunRecord
from topoplan.run.session import Outcome, Session
from topoplan.run.settings import Settings
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode


class AttachSession(Session):
    """A session that finds the processes of a run again."""

    OWNS_RUN: ClassVar[bool] = False

    def __init__(
        self,
        record: RunRecord,
        access: Access,
        *,
        settings: Settings,
        tell: Tell = lambda event: None,
        interrupts: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(record, {}, access, settings, tell=tell, interrupts=interrupts)

    @property
    def _stops_on_failure(self) -> bool:
        """A run that is being started, or may be restarted, is left to its launch to stop."""
        return self._settings.stop_on_failure and self._record.state != "starting" and not is_launch_alive(self._record)

    def _watch(self) -> Outcome:
        outcome = super()._watch()
        while outcome.end == "failed" and self._is_started_again():
            for node in self._nodes.values():
                if node.connection is not None:
                    node.connection.close()
            outcome = self._begin() or super()._watch()
        return outcome

    def _is_started_again(self) -> bool:
        """Wait for the launch, while it exists, to restart the run; return whether it did."""
        before = self._record
        if is_launch_alive(before):
            text = "the launch of this run is still active and may restart it; Ctrl-C stops watching"
            self._tell(Event(kind="note", text=text))
        while is_launch_alive(before) and not self._is_interrupted():
            now = records.load(self._run)
            if len(now.attempts) > len(before.attempts) or now.is_over:
                break
            time.sleep(INTERRUPT_LOOK_S)
        self._record = records.load(self._run)
        return len(self._record.attempts) > len(before.attempts)

    def _record_failure(self, outcome: Outcome, nodes: Sequence[WatchedNode] = ()) -> None:
        """Record a failure, unless the launch does."""
        if not is_launch_alive(self._record):
            super()._record_failure(outcome, nodes)

    def _begin(self) -> Outcome | None:
        self._wait_for_start()
        self._step("connect", f"connecting to the hosts of run {self._run}", run=self._run)
        if self._record.state == "failed" and self._record.reason:
            # The hosts' state may be a consequence of that failure: others were stopped, and a lost host is back.
            self._tell(Event(kind="note", text=f"this run failed earlier: {self._record.reason}"))
        self._targets = targets_of(self._record, self._record.nodes)
        results = self._connect(lambda label, error: None).results
        self._nodes = {place.label: self._found(place, results[place.label]) for place in self._record.nodes}
        if all(node.given_up is not None for node in self._nodes.values()):
            return self._finished(list(self._nodes.values()))
        self._planned = self._plan()
        self._step("watch", "watching; Ctrl-C stops watching, and the run goes on", run=self._run)
        return None

    def _wait_for_start(self) -> None:
        """Wait while a launch uploads files and starts the hosts: their state means nothing before."""
        deadline = Deadline(self._settings.starting_s)
        if self._record.state == "starting":
            self._step("start", f"run {self._run} is being started")
        while self._record.state == "starting" and deadline.left_s > 0 and not self._is_interrupted():
            time.sleep(INTERRUPT_LOOK_S)
            self._record = records.load(self._run)
        self._end_if_interrupted()

    def _found(self, place: NodeRecord, result: Connection | HostError) -> WatchedNode:
        connection = result if isinstance(result, Connection) else None
        log, tail_lines = self._record.log(place), self._settings.tail_lines
        node = WatchedNode.of(place, connection, log=log, tail_lines=tail_lines)
        if isinstance(result, HostError):
            # Not a failure of the run, which may go on well on a host that refuses our login.
            if result.problem in REFUSALS:
                node.given_up = result
                self._tell(host_failure(place.label, result))
            else:
                node.unreachable = result
        return node

    def _plan(self) -> RecordedPlan | None:
        """Return the prediction from the bundle, if that still belongs to the run."""
        try:
            return planned(self._record)
        except TopoplanError as error:
            why = str(error)
        self._tell(Event(kind="note", text=f"no prediction to compare with: {why}"))
        return None

    def _interrupted(self, watch: Watch | None) -> Outcome:
        """Leave the run as it is; it goes on."""
        ended = {node.name for node in watch.nodes if node.ended} if watch is not None else set()
        running = tuple(node.label for node in self._record.nodes if node.label not in ended)
        return Outcome(end="left", code=INTERRUPTED, run=self._run, running=running)
