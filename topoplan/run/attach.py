"""Coming back to a run that goes on: watch it as its launch does, from another process.

When a node fails, the others are stopped here as the launch would, which may not be there any more. For who wants to
look at what hangs they are left, and what still runs is said; their own hosts end them a while later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from topoplan.bundle.plan_file import RecordedPlan
from topoplan.errors import HostError, TopoplanError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Deadline
from topoplan.run import record as records
from topoplan.run.events import Event, Tell, host_failure
from topoplan.run.held import is_held
from topoplan.run.measurement import planned
from topoplan.run.reach import targets_of
from topoplan.run.record import NodeRecord, RunRecord
from topoplan.run.session import INTERRUPTED, Outcome, Session
from topoplan.run.settings import Settings
from topoplan.run.sight import AGAINST_US
from topoplan.run.watch import Watch
from topoplan.run.watched import Watched


class AttachSession(Session):
    """A session that finds the processes of a run again."""

    OWNS: ClassVar[bool] = False

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
    def _stops(self) -> bool:
        """One that is just being started, or would be again, is its launch's to stop."""
        return self._settings.stop_on_failure and self._record.state != "starting" and not is_held(self._record)

    def _watch(self) -> Outcome:
        outcome = super()._watch()
        while outcome.end == "failed" and self._is_started_again():
            for node in self._nodes.values():
                if node.connection is not None:
                    node.connection.close()
            outcome = self._begin() or super()._watch()
        return outcome

    def _is_started_again(self) -> bool:
        """Wait for what the launch makes of a failure, as long as it is there."""
        before = self._record
        if is_held(before):
            text = "the launch of this run is still there, and may start it again; Ctrl-C leaves"
            self._tell(Event(kind="note", text=text))
        while is_held(before) and not self._is_interrupted():
            now = records.load(self._run)
            if len(now.attempts) > len(before.attempts) or now.is_over:
                break
            time.sleep(INTERRUPT_LOOK_S)
        self._record = records.load(self._run)
        return len(self._record.attempts) > len(before.attempts)

    def _note_failure(self, outcome: Outcome, nodes: Sequence[Watched] = ()) -> None:
        """What its launch sees to is noted by that."""
        if not is_held(self._record):
            super()._note_failure(outcome, nodes)

    def _begin(self) -> Outcome | None:
        self._wait_for_start()
        self._step("connect", f"connecting to the hosts of run {self._run}", run=self._run)
        if self._record.state == "failed" and self._record.reason:
            # What the hosts say now may be what came of it: others were stopped, and one that was lost is back.
            self._tell(Event(kind="note", text=f"this run has failed before: {self._record.reason}"))
        self._targets = targets_of(self._record, self._record.nodes)
        results = self._connect(lambda label, error: None).results
        self._nodes = {place.label: self._found(place, results[place.label]) for place in self._record.nodes}
        if all(node.lost is not None for node in self._nodes.values()):
            return self._over(list(self._nodes.values()))
        self._planned = self._plan()
        self._step("watch", "watching; Ctrl-C leaves the run as it is", run=self._run)
        return None

    def _wait_for_start(self) -> None:
        """While a launch puts files on the hosts and starts one after the other, nothing can be said of them."""
        deadline = Deadline(self._settings.starting_s)
        if self._record.state == "starting":
            self._step("start", f"run {self._run} is being started")
        while self._record.state == "starting" and deadline.left_s > 0 and not self._is_interrupted():
            time.sleep(INTERRUPT_LOOK_S)
            self._record = records.load(self._run)
        self._end_if_interrupted()

    def _found(self, place: NodeRecord, result: Connection | HostError) -> Watched:
        connection = result if isinstance(result, Connection) else None
        log, tail_lines = self._record.log(place), self._settings.tail_lines
        node = Watched.of(place, connection, log=log, tail_lines=tail_lines)
        if isinstance(result, HostError):
            # Not of the run: that may go on well where we are not let in.
            if result.problem in AGAINST_US:
                node.lost = result
                self._tell(host_failure(place.label, result))
            else:
                node.unseen = result
        return node

    def _plan(self) -> RecordedPlan | None:
        """What was predicted: by the bundle, where it is still that of the run."""
        try:
            return planned(self._record)
        except TopoplanError as error:
            why = str(error)
        self._tell(Event(kind="note", text=f"no prediction to compare with: {why}"))
        return None

    def _interrupted(self, watch: Watch | None) -> Outcome:
        """Leave; the run goes on."""
        ended = {node.name for node in watch.nodes if node.ended} if watch is not None else set()
        running = tuple(node.label for node in self._record.nodes if node.label not in ended)
        return Outcome(end="left", code=INTERRUPTED, run=self._run, running=running)
