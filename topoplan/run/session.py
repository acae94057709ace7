"""What a client does with one run, from its start or from some later moment.

It watches the run to its end, reconnects to hosts it has lost, copies the logs, finds out why the run failed, stops it,
and records how it ended. `launch.py` begins by starting the processes, `attach.py` by finding them again. A host that
cannot be seen does not end the run. Every step before the watching has a deadline, and every step can be interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

from topoplan.bundle.draft import Draft
from topoplan.bundle.plan_file import RecordedPlan
from topoplan.errors import HostError, InputError, OutputError
from topoplan.planner.exhausted import exhausted_words
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import Hosts, connect_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Call, Deadline
from topoplan.run import record as records
from topoplan.run.drift import DriftDetector
from topoplan.run.events import Event, Tell
from topoplan.run.failure import FAILED, Failure, first_cause, hang_failure
from topoplan.run.measurement import ended_of, fetch, measured_words, measurement, trainer_file
from topoplan.run.outcome import grace_of_stop_s, record_state
from topoplan.run.progress import Progress
from topoplan.run.record import Attempt, Drifted, RunRecord, RunState
from topoplan.run.secrets import Mask
from topoplan.run.settings import Settings
from topoplan.run.stacks import stack_lines
from topoplan.run.stopping import stop_all
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode, first_failure_s, log_copy_problems

_PEEK_BYTES = 4096
"""How much of the end of a trainer's log file to read while it is being written: its last lines."""
T = TypeVar("T")

End = Literal["ended", "failed", "stopped", "interrupted", "detached", "left", "refused", "unknown"]
"""How a session ended. `stopped`: by another process, such as `topoplan runs stop`. `interrupted`: by the user, which
stops the run if this session started it. `detached`, `left`: on request, and the run goes on. `refused`: nothing was
uploaded to any host. `unknown`: hosts were unseen for as long as was allowed, or refuse the login, and no other
failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a session."""

    end: End
    code: int
    """Exit code for the shell: the run's own, 1 if no script left one, 130 if the user ended the run or left it."""
    run: str = ""
    """Id of the run; empty if nothing was uploaded to any host."""
    failure: Failure | None = None
    errors: Mapping[str, HostError] = field(default_factory=dict)
    """By node: why the launch could not go on, or why the node could not be stopped or seen."""
    running: tuple[str, ...] = ()
    """Nodes on which processes of the run may still be running."""
    attempts: tuple[Attempt, ...] = ()
    """The attempts before the last one."""
    lost_steps: int = 0
    """Optimizer steps of the earlier attempts that had to be repeated."""
    stepless: bool = False
    """Whether the run ended well without a single training step having been seen."""


class Interrupted(Exception):  # noqa: N818  what the user asked for is no error
    """The user wants the session to end."""


class Session(ABC):
    """One session with a run. `go` performs all of it and may be called once."""

    OWNS_RUN: ClassVar[bool]
    """Whether this session owns the run: Ctrl-C then stops it, a second one leaves it, and its record counts."""

    def __init__(
        self,
        record: RunRecord,
        targets: Mapping[str, Target],
        access: Access,
        settings: Settings,
        *,
        tell: Tell = lambda event: None,
        interrupts: Callable[[], int] = lambda: 0,
        hidden: Iterable[str] = (),
    ) -> None:
        """Store the arguments without contacting any host.

        `targets` are keyed by node label. `interrupts` returns how often the user has asked to end. The values in
        `hidden` are masked in everything that is reported or recorded.
        """
        self._record, self._targets, self._access, self._settings = record, targets, access, settings
        self._mask = Mask(hidden)
        self._tell: Tell = lambda event: tell(self._mask.value(event))
        self._interrupts = interrupts
        self._connections: dict[str, Connection] = {}
        self._nodes: dict[str, WatchedNode] = {}
        """By node label; each holds its latest connection."""
        self._planned: Draft | RecordedPlan | None = None
        """The prediction for the run, if it is known."""
        self._has_record = not self.OWNS_RUN
        """Whether the run has a record, so that other processes can find it."""
        self._last_step: int | None = None
        """Last training step seen when the run was over."""
        self._give_up = False

    def go(self) -> Outcome:
        """Perform the session. Raises InputError: wrong SSH configuration, or no place for the record."""
        try:
            outcome = self._begin() or self._watch()
            self._measure(outcome)
        except Interrupted:
            self._give_up = True
            outcome = self._interrupted(None)
        except Exception:
            if self.OWNS_RUN:
                self._stop_all()
            raise
        finally:
            latest = [node.connection for node in list(self._nodes.values())]
            for connection in (*self._connections.values(), *latest):
                if connection is not None:
                    connection.close()
        errors = {name: self._mask.error(error) for name, error in outcome.errors.items()}
        return replace(outcome, failure=self._mask.value(outcome.failure), errors=errors)

    # ---------------------------------------------------------------------------------------- implemented by subclasses

    @abstractmethod
    def _begin(self) -> Outcome | None:
        """Fill `_nodes` with the nodes to watch; return an outcome if there is nothing to watch."""

    @abstractmethod
    def _interrupted(self, watch: Watch | None) -> Outcome:
        """Do what the user wants when pressing Ctrl-C."""

    @property
    @abstractmethod
    def _stops_on_failure(self) -> bool:
        """Whether to stop the run when it fails."""

    def _may_detach(self, watch: Watch) -> bool:
        """Whether the run may be left running now, as the user requested."""
        return False

    # ---------------------------------------------------------------------------------------------- watching to the end

    def _watch(self) -> Outcome:
        progress, drift = self._expected()
        watch = Watch(
            sorted(self._nodes.values(), key=lambda node: node.node),
            tell=self._tell,
            reconnect=self._reconnect,
            lost_after_s=self._settings.lost_after_s,
            progress=progress,
            drift=drift,
            ranks_per_node=self._ranks_per_node,
            hang_after_s=self._settings.hang_after_s,
        )
        try:
            ends: tuple[tuple[Callable[[], bool], Callable[[], Outcome]], ...] = (
                (lambda: self._has_failed(watch), lambda: self._failed(watch)),
                (self._is_interrupted, lambda: self._interrupted(watch)),
                (lambda: watch.has_hung, lambda: self._hung(watch)),
                (lambda: self._may_detach(watch), self._detached),
                (lambda: self._is_given_up(watch), lambda: self._finished(watch.nodes)),
            )
            watch.until(lambda: any(is_so() for is_so, _ in ends))
            end = next((end for is_so, end in ends if is_so()), lambda: self._finished(watch.nodes))
            self._last_step = watch.status.step or None
            return end()
        finally:
            watch.close()

    def _expected(self) -> tuple[Progress, DriftDetector]:
        """Return the readers of the run's output, for its progress and for drift from the prediction."""
        if self._planned is None:
            progress = Progress()
            return progress, DriftDetector(progress, tell=self._tell, note=self._record_drift)
        spec, plan, settings = self._planned.spec, self._planned.plan, self._settings

        def peek(host: Connection) -> str:
            end = trainer_file(self._record, spec, plan, host, settings.stop_s, most_bytes=_PEEK_BYTES)
            return end.decode("utf-8", "replace")

        progress = Progress.of(spec, plan, ends_at=self._ends_at)
        return progress, DriftDetector.of(progress, spec, plan, tell=self._tell, note=self._record_drift, peek=peek)

    @property
    def _ends_at(self) -> int | None:
        """Step at which this session ends the run although the trainer would go on; None if it does not."""
        return None

    @property
    def _ranks_per_node(self) -> int | None:
        return self._planned.spec.cluster.gpus_per_node if self._planned is not None else None

    def _has_failed(self, watch: Watch) -> bool:
        """Whether the run has failed. For a session that only watches, a host that was given up on is not a failure."""
        return any(node.failed and (node.given_up is None or self._stops_on_failure) for node in watch.nodes)

    def _is_given_up(self, watch: Watch) -> bool:
        return watch.is_offline or any(node.failed and node.given_up is not None for node in watch.nodes)

    def _failed(self, watch: Watch) -> Outcome:
        """Find the first failure and its cause, then stop the other nodes or wait briefly for them to end."""
        ranks = self._ranks_per_node
        found = first_cause(watch, ranks_per_node=ranks, tell=self._tell, leave=self._is_interrupted)
        failure, code = found or (None, FAILED)
        if failure is not None:
            failure = replace(failure, stacks=tuple(stack_lines(watch.stacks)))
        elsewhere = self._is_stopped_elsewhere(watch)
        if self._stops_on_failure and (self.OWNS_RUN or not elsewhere):
            running = [node.name for node in watch.nodes if not node.is_over]
            if running and not elsewhere:
                leaves = "" if self.OWNS_RUN else "; Ctrl-C quits at once"
                self._step("stop", f"stopping {', '.join(running)}{leaves}")
            errors = self._stop_all(watch)
            left = tuple(errors)
        else:
            if not elsewhere:
                self._linger(watch)
            errors, left = _unreachable(watch.nodes), _not_ended(watch.nodes)
        if elsewhere:
            return self._stopped_elsewhere(code, errors, left, watch.nodes)
        return self._failed_outcome(watch, failure, code, errors, left)

    def _failed_outcome(
        self, watch: Watch, failure: Failure | None, code: int, errors: Mapping[str, HostError], left: tuple[str, ...]
    ) -> Outcome:
        self._last_step = watch.status.step or None
        outcome = Outcome(end="failed", code=code, run=self._run, failure=failure, errors=errors, running=left)
        if self.OWNS_RUN or not left:
            self._record_failure(outcome, watch.nodes)
        return outcome

    def _record_failure(self, outcome: Outcome, nodes: Sequence[WatchedNode] = ()) -> None:
        reason = outcome.failure.reason if outcome.failure is not None else ""
        words = "; not stopped: ".join(filter(None, (reason, ", ".join(outcome.running))))
        self._update_record("failed", outcome.code, reason=words, nodes=nodes, left=outcome.running)

    def _hung(self, watch: Watch) -> Outcome:
        failure = hang_failure(watch, ranks_per_node=self._ranks_per_node)
        self._step("stop", f"{failure.what}: stopping all nodes, as requested by --hang-after")
        errors = self._stop_all(watch)
        return self._failed_outcome(watch, failure, FAILED, errors, tuple(errors))

    def _is_stopped_elsewhere(self, watch: Watch) -> bool:
        """Whether somebody asked to stop the run before its first node ended; if so, give the others time to end."""
        grace_s = grace_of_stop_s(self._run, first_failure_s(watch.nodes))
        if grace_s is None:
            return False
        if running := [node.name for node in watch.nodes if not node.is_over]:
            self._step("stop", f"another process is stopping the run; waiting for {', '.join(running)}")
            watch.stopping = True
            watch.until(self._is_interrupted, deadline_s=grace_s + self._settings.stop_s)
        return True

    def _linger(self, watch: Watch) -> None:
        """Wait briefly for the other nodes to end too: their own launch may be alive and stop them."""
        linger_s = self._settings.linger_s - (time.monotonic() - first_failure_s(watch.nodes))
        if linger_s > 0 and any(not node.is_over for node in watch.nodes):
            text = f"a node has failed; waiting {linger_s:.0f} s for the others to end too"
            self._tell(Event(kind="note", text=text))
            watch.until(self._is_interrupted, deadline_s=linger_s)

    def _finished(self, nodes: Sequence[WatchedNode]) -> Outcome:
        """Return the outcome when all nodes have ended well, or the rest, which may run on, cannot be reached."""
        if running := _not_ended(nodes):
            return Outcome(end="unknown", code=FAILED, run=self._run, errors=_unreachable(nodes), running=running)
        if grace_of_stop_s(self._run, max(node.ended_at_s or 0.0 for node in nodes)) is not None:
            return self._stopped_elsewhere(FAILED, {}, (), nodes)
        self._update_record("ended", 0, nodes=nodes)
        return Outcome(end="ended", code=0, run=self._run)

    def _detached(self) -> Outcome:
        self._update_record("running")
        return Outcome(end="detached", code=0, run=self._run)

    def _stopped_elsewhere(
        self, code: int, errors: Mapping[str, HostError], running: tuple[str, ...], nodes: Sequence[WatchedNode] = ()
    ) -> Outcome:
        if self.OWNS_RUN and not running:
            self._update_record("stopped", code, reason="topoplan runs stop", nodes=nodes)
        return Outcome(end="stopped", code=code, run=self._run, errors=errors, running=running)

    def _stop_all(
        self, watch: Watch | None = None, *, grace_s: float | None = None, only: Collection[str] | None = None
    ) -> dict[str, HostError]:
        """Stop the nodes concurrently and read their last output; return the errors of those not stopped."""
        settings = self._settings
        wanted = [node for node in self._nodes.values() if only is None or node.name in only]
        return stop_all(
            sorted(wanted, key=lambda node: node.node),
            settings if grace_s is None else replace(settings, grace_s=grace_s),
            reconnect=self._reconnect,
            at_once=lambda: self._interrupts() > int(self.OWNS_RUN),
            watch=watch,
        )

    def _measure(self, outcome: Outcome) -> None:
        """Record and report what the run measured, once it is over."""
        if self._planned is None or outcome.end not in ("ended", "failed", "stopped", "interrupted"):
            return
        spec, plan, record = self._planned.spec, self._planned.plan, self._record
        first = self._nodes.get(record.nodes[0].label)
        fetch(record, spec, plan, first.connection if first else None, self._settings.stop_s)
        if outcome.end == "failed" and (ended := ended_of(record, spec, plan)):
            for words in exhausted_words(spec, plan, ended.found):
                self._tell(Event(kind="measured", text=words, data={"out_of_memory": True}))
        found = measurement(record, spec, plan)
        if found is not None:
            with contextlib.suppress(InputError):
                self._record = records.update(self._run, measurement=found)
            self._tell(Event(kind="measured", text=measured_words(found), data=dataclasses.asdict(found)))

    def _record_drift(self, found: Drifted) -> None:
        """Add a drift to the run's record, unless another watching process has recorded it."""
        with contextlib.suppress(InputError, OutputError):
            known = records.load(self._run).drifts
            same = [one for one in known if (one.what, one.state) == (found.what, found.state)]
            if not any(one.step >= found.since_step for one in same):
                records.update(self._run, drifts=(*known, found))

    # ---------------------------------------------------------------------------------------------------------- helpers

    @property
    def _run(self) -> str:
        return self._record.run_id if self._has_record else ""

    def _connect(self, on_failure: Callable[[str, HostError], None]) -> Hosts:
        """Log in to all hosts; the result is keyed by label, in the order of the targets."""

        def done(name: str, result: Connection | HostError) -> None:
            if isinstance(result, HostError):
                on_failure(name, result)
            elif self._give_up:
                result.close()

        results = self._wait(
            lambda: connect_all(self._targets, self._access, deadline_s=self._settings.connect_s, on_done=done)
        )
        hosts = Hosts(results=results)
        self._connections = hosts.connections
        return hosts

    def _reconnect(self, name: str, deadline_s: float) -> Connection:
        return connect(self._targets[name], self._access, deadline_s=deadline_s)

    def _wait(self, job: Callable[[], T], *, settle: bool = False) -> T:
        """Return the result of `job`, unless the user interrupts.

        With `settle`, an interrupted job is given time to finish, so that it does nothing after the nodes were stopped.
        """
        self._end_if_interrupted()  # a job may be done before the first look at it
        call = Call(job)
        while not call.done.wait(INTERRUPT_LOOK_S):
            try:
                self._end_if_interrupted()
            except Interrupted:
                if settle:
                    self._settle(call)
                raise
        return call.result()

    def _is_interrupted(self) -> bool:
        return self._interrupts() > 0

    def _end_if_interrupted(self) -> None:
        if self._is_interrupted():
            self._give_up = True
            raise Interrupted

    def _settle(self, call: Call[T]) -> None:
        deadline = Deadline(self._settings.stop_s)
        while not call.done.wait(INTERRUPT_LOOK_S) and deadline.left_s > 0 and self._interrupts() < 2:
            pass

    def _update_record(
        self,
        state: RunState,
        code: int | None = None,
        *,
        reason: str = "",
        nodes: Sequence[WatchedNode] = (),
        left: tuple[str, ...] = (),
    ) -> None:
        """Update the record, unless another process has recorded the end. A full disk is not fatal: the hosts know."""
        if not self._has_record:
            return
        codes = {node.name: node.code for node in nodes if node.code is not None}
        trouble = log_copy_problems(nodes)
        told = (self._record.trouble, trouble)
        try:
            known = records.load(self._run)
            if known.state == "starting" and not self.OWNS_RUN:
                return
            words = self._mask.text(reason)
            self._record = record_state(
                known, state, code, reason=words, codes=codes, left=left, trouble=trouble, unless_over=not self.OWNS_RUN
            )
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))
        else:
            if self._record.trouble not in told:
                self._tell(Event(kind="note", text=self._record.trouble))

    def _step(self, step: str, text: str, **data: object) -> None:
        self._tell(Event(kind="step", text=text, data={"step": step, **data}))


def _unreachable(nodes: Iterable[WatchedNode]) -> dict[str, HostError]:
    return {node.name: why for node in nodes if (why := node.unreachable or node.given_up) is not None}


def _not_ended(nodes: Iterable[WatchedNode]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if not node.ended)
