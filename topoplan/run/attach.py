"""Coming back to a run that goes on: watch it as its launch does, from another process.

The launch stops the other nodes when one fails. Where it was detached, or has died, nobody does: they wait for the one
that failed until their collectives time out. So a failure ends the watching soon, and says what still runs; stopping
that is done only for who asks for it, as the launch may still be there, or somebody may want to look at what hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from topoplan.bundle.plan_file import RecordedPlan, read_plan_file
from topoplan.errors import HostError, InputError, TopoplanError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all
from topoplan.remote.keys import Access
from topoplan.remote.reach import targets_of
from topoplan.remote.ssh import CONNECT_S, connect
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Call, Deadline
from topoplan.run import record as records
from topoplan.run.events import Event, Tell, host_failure
from topoplan.run.failure import FAILED, Failure, first_cause
from topoplan.run.outcome import note, stopped_with_grace_s
from topoplan.run.progress import Progress
from topoplan.run.record import RunRecord, RunState
from topoplan.run.run import INTERRUPTED
from topoplan.run.sight import AGAINST_US
from topoplan.run.stopping import StopTimes, let_be_stopped, stop_all
from topoplan.run.watch import Watch, Watched, failed_at, not_kept

End = Literal["ended", "failed", "stopped", "left", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long each step may take, and what is wanted."""

    tail_lines: int = 10
    """Lines of the past to begin with."""
    stop_on_failure: bool = False
    """Stop the others when a node fails."""
    stop_times: StopTimes = field(default_factory=StopTimes)
    connect_s: float = CONNECT_S
    lost_after_s: float | None = None
    """A host that was not seen for so long is given up, and the watching with it; None: never."""
    starting_s: float = 30.0
    """How long to wait for a launch that is about to start the run."""
    linger_s: float = 15.0
    """After the first failure, time for the others to end: more than the usual grace of a launch that stops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """How the watching ended."""

    end: End
    """`stopped`: by somebody else. `left`: on request, and the run goes on. `unknown`: a host cannot be seen and was
    given up, or does not let us in, and no other node has failed."""
    code: int
    """For the shell: the run's, 1 where that is not known, 130 when the user left."""
    run: str
    failure: Failure | None = None
    errors: Mapping[str, HostError] = field(default_factory=dict)
    """By node: why its host cannot be seen, or why it could not be stopped."""
    running: tuple[str, ...] = ()
    """Nodes that have not ended, as far as is known."""


class Attach:
    """Watches a run. `go` does all of it; call it once."""

    def __init__(
        self,
        record: RunRecord,
        access: Access,
        *,
        settings: Settings,
        tell: Tell = lambda event: None,
        interrupts: Callable[[], int] = lambda: 0,
    ) -> None:
        """Touch nothing yet. `interrupts` says how often the user has asked to leave."""
        self._record, self._access, self._settings = record, access, settings
        self._tell, self._interrupts = tell, interrupts
        self._targets: dict[str, Target] = {}

    @property
    def _stops(self) -> bool:
        """Whether to stop the run when it fails. One that is just being started is its launch's to stop."""
        return self._settings.stop_on_failure and self._record.state != "starting"

    def go(self) -> Attached:
        """Watch until the run has ended, a node has failed or the user leaves.

        Raises:
            InputError: the SSH configuration is wrong.
        """
        labels = tuple(node.label for node in self._record.nodes)
        self._wait_for_start()
        if self._interrupts():
            return self._outcome("left", INTERRUPTED, running=labels)
        self._step("connect", f"connecting to the hosts of run {self._record.run_id}", run=self._record.run_id)
        if self._record.state == "failed" and self._record.reason:
            # What the hosts say now may be what came of it: others were stopped, and one that was lost is back.
            self._tell(Event(kind="note", text=f"this run has failed before: {self._record.reason}"))
        self._targets = targets_of(self._record, self._record.nodes)
        settings = self._settings
        call = Call(lambda: connect_all(self._targets, self._access, deadline_s=settings.connect_s))
        while not call.done.wait(INTERRUPT_LOOK_S):
            if self._interrupts():
                return self._outcome("left", INTERRUPTED, running=labels)
        results = call.result()
        try:
            nodes = [self._watched(label, result) for label, result in results.items()]
            if all(node.lost is not None for node in nodes):
                return self._over(nodes, None)
            return self._watch(nodes)
        finally:
            for result in results.values():
                if isinstance(result, Connection):
                    result.close()

    def _wait_for_start(self) -> None:
        """While a launch puts files on the hosts and starts one after the other, nothing can be said of them."""
        deadline = Deadline(self._settings.starting_s)
        if self._record.state == "starting":
            self._step("start", f"run {self._record.run_id} is being started")
        while self._record.state == "starting" and deadline.left_s > 0 and not self._interrupts():
            time.sleep(INTERRUPT_LOOK_S)
            self._record = records.load(self._record.run_id)

    def _watched(self, label: str, result: Connection | HostError) -> Watched:
        place = next(node for node in self._record.nodes if node.label == label)
        node = Watched(
            node=place.node,
            name=label,
            address=place.address,
            run_dir=place.run_dir,
            started=place.started,
            connection=result if isinstance(result, Connection) else None,
            log=self._record.log(place),
            tail_lines=self._settings.tail_lines,
        )
        if isinstance(result, HostError):
            # Not of the run: that may go on well where we are not let in.
            if result.problem in AGAINST_US:
                node.lost = result
                self._tell(host_failure(label, result))
            else:
                node.unseen = result
        return node

    def _watch(self, nodes: list[Watched]) -> Attached:
        planned = self._planned()
        watch = Watch(
            nodes,
            tell=self._tell,
            reconnect=self._reconnect,
            lost_after_s=self._settings.lost_after_s,
            progress=Progress.of(planned.spec, planned.plan) if planned is not None else None,
        )
        self._step("watch", "watching; Ctrl-C leaves the run as it is", run=self._record.run_id)
        try:
            watch.until(lambda: self._interrupts() > 0 or self._is_given_up(watch) or self._has_failed(watch))
            if not self._has_failed(watch):
                if self._interrupts():
                    running = tuple(node.name for node in nodes if not node.ended)
                    return self._outcome("left", INTERRUPTED, running=running)
                return self._over(nodes, None)
            ranks = planned.spec.cluster.gpus_per_node if planned is not None else None
            found = first_cause(watch, ranks_per_node=ranks, tell=self._tell, leave=lambda: self._interrupts() > 0)
            left = self._let_end(watch)
            return self._over(nodes, found, left)
        finally:
            watch.close()
            for node in nodes:
                if node.connection is not None:
                    node.connection.close()

    def _has_failed(self, watch: Watch) -> bool:
        """Whether the run has. For who only watches it, a host that is given up is no failure of it."""
        return any(node.failed and (node.lost is None or self._stops) for node in watch.nodes)

    def _is_given_up(self, watch: Watch) -> bool:
        """Whether enough was waited for hosts that cannot be seen."""
        return watch.is_blind or any(node.failed and node.lost is not None for node in watch.nodes)

    def _let_end(self, watch: Watch) -> Mapping[str, HostError]:
        """After a failure, stop the others or wait a moment whether they end; what could not be stopped."""
        stopped = let_be_stopped(
            watch,
            self._record.run_id,
            self._settings.stop_times,
            tell=self._tell,
            leave=lambda: self._interrupts() > 0,
        )
        running = [node.name for node in watch.nodes if not node.ended]
        if self._stops:
            if running:
                self._step("stop", f"stopping {', '.join(running)}; Ctrl-C leaves at once")
            return stop_all(
                watch.nodes,
                self._settings.stop_times,
                reconnect=self._reconnect,
                at_once=lambda: self._interrupts() > 0,
                watch=watch,
            )
        linger_s = self._settings.linger_s - (time.monotonic() - failed_at(watch.nodes))
        if linger_s > 0 and not stopped and any(not node.over for node in watch.nodes):
            text = f"a node has failed; looking for {linger_s:.0f} s whether the others end too"
            self._tell(Event(kind="note", text=text))
            watch.until(lambda: self._interrupts() > 0, deadline_s=linger_s)
        return {}

    def _over(
        self, nodes: list[Watched], found: tuple[Failure, int] | None, left: Mapping[str, HostError] | None = None
    ) -> Attached:
        errors = {node.name: why for node in nodes if (why := node.unseen or node.lost) is not None}
        errors |= dict(left or {})
        running = tuple(node.name for node in nodes if not node.ended)
        if self._stops and found is not None:
            running = tuple(name for name in running if name in errors)
        codes = {node.name: node.code for node in nodes if node.ended}
        if found is not None:
            failure, code = found
            if stopped_with_grace_s(self._record.run_id, failed_at(nodes)) is not None:
                return self._outcome("stopped", code, errors=errors, running=running)
            if not running:
                self._note("failed", code, failure.reason, codes, not_kept(nodes))
            return self._outcome("failed", code, failure=failure, errors=errors, running=running)
        if running:
            return self._outcome("unknown", FAILED, errors=errors, running=running)
        self._note("ended", 0, "", codes, not_kept(nodes))
        return self._outcome("ended", 0)

    def _outcome(
        self,
        end: End,
        code: int,
        *,
        failure: Failure | None = None,
        errors: Mapping[str, HostError] | None = None,
        running: tuple[str, ...] = (),
    ) -> Attached:
        return Attached(
            end=end, code=code, run=self._record.run_id, failure=failure, errors=errors or {}, running=running
        )

    def _reconnect(self, label: str, deadline_s: float) -> Connection:
        return connect(self._targets[label], self._access, deadline_s=deadline_s)

    def _planned(self) -> RecordedPlan | None:
        """What was predicted: by the bundle, where it is still that of the run."""
        try:
            planned = read_plan_file(self._record.bundle)
            if planned.source.data.get("run") == self._record.name:
                return planned
            why = f"{self._record.bundle} is the bundle of another run now"
        except TopoplanError as error:
            why = str(error)
        self._tell(Event(kind="note", text=f"no prediction to compare with: {why}"))
        return None

    def _note(self, state: RunState, code: int, reason: str, codes: Mapping[str, int | None], trouble: str) -> None:
        """Bring the record up to date, unless another process has done so."""
        try:
            known = records.load(self._record.run_id)
            if known.state != "starting":
                note(known, state, code, reason=reason, codes=codes, trouble=trouble, unless_over=True)
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))

    def _step(self, step: str, text: str, **data: object) -> None:
        self._tell(Event(kind="step", text=text, data={"step": step, **data}))
