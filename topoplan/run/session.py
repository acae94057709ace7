"""What a client does with one run, from its start or from somewhere in the middle: watch it to its end, see hosts again
that were lost, copy the logs, find out why it failed, stop it, and note how it ended.

`launch.py` begins by starting the processes, `attach.py` by finding them again. A host that cannot be seen ends
nothing. Every step before the watching has a deadline, and every step can be interrupted.
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
from topoplan.run.drift import Drift
from topoplan.run.events import Event, Tell
from topoplan.run.failure import FAILED, Failure, first_cause, hang
from topoplan.run.measurement import ended_of, fetch, measured_words, measurement, trainer_file
from topoplan.run.outcome import note, stopped_with_grace_s
from topoplan.run.progress import Progress
from topoplan.run.record import Attempt, Drifted, RunRecord, RunState
from topoplan.run.secrets import Mask
from topoplan.run.settings import Settings
from topoplan.run.stacks import stack_lines
from topoplan.run.stopping import stop_all
from topoplan.run.watch import Watch
from topoplan.run.watched import Watched, failed_at, not_kept

_PEEK_BYTES = 4096
"""Of a trainer's file while it is written: the last lines."""
T = TypeVar("T")

INTERRUPTED = 130

End = Literal["ended", "failed", "stopped", "interrupted", "detached", "left", "refused", "unknown"]
"""`stopped`: by somebody else, such as `topoplan runs stop`. `interrupted`: by the user, which stops the run that this
session has started. `detached`, `left`: on request, and the run goes on. `refused`: nothing was put on any host.
`unknown`: hosts that were not seen for as long as was wanted, or do not let us in, and no other node has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a session ended."""

    end: End
    code: int
    """For the shell: the run's, 1 where no script said one, 130 when the user ended it or left."""
    run: str = ""
    """Id of the run; empty where nothing was put on any host."""
    failure: Failure | None = None
    errors: Mapping[str, HostError] = field(default_factory=dict)
    """By node: what kept the launch from going on, or the node from being stopped or seen."""
    running: tuple[str, ...] = ()
    """Nodes on which something of the run may still be running."""
    attempts: tuple[Attempt, ...] = ()
    """Those before the last."""
    lost_steps: int = 0
    """Optimizer steps that these did for nothing."""
    stepless: bool = False
    """Whether it ended well, and no step of a training was seen."""


class Interrupted(Exception):  # noqa: N818  what the user asked for is no error
    """The user wants it to end."""


class Session(ABC):
    """One session with a run. `go` does all of it; call it once."""

    OWNS: ClassVar[bool]
    """Whether the run is this session's: then Ctrl-C stops it, the second one leaves, and what is noted here counts."""

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
        """Touch nothing yet.

        `targets` are by labels of nodes. `interrupts` says how often the user has asked to end. `hidden` values are in
        nothing that is told or noted.
        """
        self._record, self._targets, self._access, self._settings = record, targets, access, settings
        self._mask = Mask(hidden)
        self._tell: Tell = lambda event: tell(self._mask.value(event))
        self._interrupts = interrupts
        self._connections: dict[str, Connection] = {}
        self._nodes: dict[str, Watched] = {}
        """By label; their connections are the latest."""
        self._planned: Draft | RecordedPlan | None = None
        """What was predicted of it, where that is known."""
        self._is_noted = not self.OWNS
        """Whether others can find the run."""
        self._last_step: int | None = None
        """Of the trainer, when the run was over."""
        self._give_up = False

    def go(self) -> Outcome:
        """Do it, and say how it went.

        Raises:
            InputError: the SSH configuration is wrong, or there is no place for the record.
        """
        try:
            outcome = self._begin() or self._watch()
            self._measure(outcome)
        except Interrupted:
            self._give_up = True
            outcome = self._interrupted(None)
        except Exception:
            if self.OWNS:
                self._stop_all()
            raise
        finally:
            latest = [node.connection for node in list(self._nodes.values())]
            for connection in (*self._connections.values(), *latest):
                if connection is not None:
                    connection.close()
        errors = {name: self._mask.error(error) for name, error in outcome.errors.items()}
        return replace(outcome, failure=self._mask.value(outcome.failure), errors=errors)

    # ------------------------------------------------------------------------------------------- what begins it differs

    @abstractmethod
    def _begin(self) -> Outcome | None:
        """Have `_nodes` to watch. The outcome where there is nothing to watch."""

    @abstractmethod
    def _interrupted(self, watch: Watch | None) -> Outcome:
        """What the user wants with Ctrl-C."""

    @property
    @abstractmethod
    def _stops(self) -> bool:
        """Whether to stop the run when it fails."""

    def _may_leave(self, watch: Watch) -> bool:
        """Whether the run may be left now, as was wanted."""
        return False

    # ------------------------------------------------------------------------------------------------------- to its end

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
                (lambda: watch.hangs, lambda: self._hung(watch)),
                (lambda: self._may_leave(watch), self._detached),
                (lambda: self._is_given_up(watch), lambda: self._over(watch.nodes)),
            )
            watch.until(lambda: any(is_so() for is_so, _ in ends))
            end = next((end for is_so, end in ends if is_so()), lambda: self._over(watch.nodes))
            self._last_step = watch.status.step or None
            return end()
        finally:
            watch.close()

    def _expected(self) -> tuple[Progress, Drift]:
        """What reads the lines of the run, with what was predicted of it."""
        if self._planned is None:
            progress = Progress()
            return progress, Drift(progress, tell=self._tell, note=self._note_drift)
        spec, plan, settings = self._planned.spec, self._planned.plan, self._settings

        def peek(host: Connection) -> str:
            end = trainer_file(self._record, spec, plan, host, settings.stop_s, most_bytes=_PEEK_BYTES)
            return end.decode("utf-8", "replace")

        progress = Progress.of(spec, plan)
        return progress, Drift.of(progress, spec, plan, tell=self._tell, note=self._note_drift, peek=peek)

    @property
    def _ranks_per_node(self) -> int | None:
        return self._planned.spec.cluster.gpus_per_node if self._planned is not None else None

    def _has_failed(self, watch: Watch) -> bool:
        """Whether the run has. For who only watches it, a host that is given up is no failure of it."""
        return any(node.failed and (node.lost is None or self._stops) for node in watch.nodes)

    def _is_given_up(self, watch: Watch) -> bool:
        """Whether enough was waited for hosts that cannot be seen."""
        return watch.is_blind or any(node.failed and node.lost is not None for node in watch.nodes)

    def _failed(self, watch: Watch) -> Outcome:
        """Find out who was first and why, and stop the others or wait a moment whether they end."""
        ranks = self._ranks_per_node
        found = first_cause(watch, ranks_per_node=ranks, tell=self._tell, leave=self._is_interrupted)
        failure, code = found or (None, FAILED)
        if failure is not None:
            failure = replace(failure, stacks=tuple(stack_lines(watch.stacks)))
        elsewhere = self._is_stopped_elsewhere(watch)
        if self._stops and (self.OWNS or not elsewhere):
            running = [node.name for node in watch.nodes if not node.over]
            if running and not elsewhere:
                leaves = "" if self.OWNS else "; Ctrl-C leaves at once"
                self._step("stop", f"stopping {', '.join(running)}{leaves}")
            errors = self._stop_all(watch)
            left = tuple(errors)
        else:
            if not elsewhere:
                self._linger(watch)
            errors, left = _unseen(watch.nodes), _not_ended(watch.nodes)
        if elsewhere:
            return self._stopped_elsewhere(code, errors, left, watch.nodes)
        return self._over_with(watch, failure, code, errors, left)

    def _over_with(
        self, watch: Watch, failure: Failure | None, code: int, errors: Mapping[str, HostError], left: tuple[str, ...]
    ) -> Outcome:
        self._last_step = watch.status.step or None
        outcome = Outcome(end="failed", code=code, run=self._run, failure=failure, errors=errors, running=left)
        if self.OWNS or not left:
            self._note_failure(outcome, watch.nodes)
        return outcome

    def _note_failure(self, outcome: Outcome, nodes: Sequence[Watched] = ()) -> None:
        reason = outcome.failure.reason if outcome.failure is not None else ""
        words = "; not stopped: ".join(filter(None, (reason, ", ".join(outcome.running))))
        self._note("failed", outcome.code, reason=words, nodes=nodes, left=outcome.running)

    def _hung(self, watch: Watch) -> Outcome:
        """End a run in which no step comes any more."""
        failure = hang(watch, ranks_per_node=self._ranks_per_node)
        self._step("stop", f"{failure.what}: stopping all nodes, as --hang-after wants")
        errors = self._stop_all(watch)
        return self._over_with(watch, failure, FAILED, errors, tuple(errors))

    def _is_stopped_elsewhere(self, watch: Watch) -> bool:
        """Whether somebody had asked to stop the run before the first node ended. Then the others are waited for as
        long as they were given to end by themselves."""
        grace_s = stopped_with_grace_s(self._run, failed_at(watch.nodes))
        if grace_s is None:
            return False
        if running := [node.name for node in watch.nodes if not node.over]:
            self._step("stop", f"the run is being stopped by somebody else; waiting for {', '.join(running)}")
            watch.stopping = True
            watch.until(self._is_interrupted, deadline_s=grace_s + self._settings.stop_s)
        return True

    def _linger(self, watch: Watch) -> None:
        """Wait a moment whether the others end too: their launch may be there and stop them."""
        linger_s = self._settings.linger_s - (time.monotonic() - failed_at(watch.nodes))
        if linger_s > 0 and any(not node.over for node in watch.nodes):
            text = f"a node has failed; looking for {linger_s:.0f} s whether the others end too"
            self._tell(Event(kind="note", text=text))
            watch.until(self._is_interrupted, deadline_s=linger_s)

    def _over(self, nodes: Sequence[Watched]) -> Outcome:
        """All have ended well, or nobody can be asked any more. Then the run goes on where it does."""
        if running := _not_ended(nodes):
            return Outcome(end="unknown", code=FAILED, run=self._run, errors=_unseen(nodes), running=running)
        if stopped_with_grace_s(self._run, max(node.trouble_at or 0.0 for node in nodes)) is not None:
            return self._stopped_elsewhere(FAILED, {}, (), nodes)
        self._note("ended", 0, nodes=nodes)
        return Outcome(end="ended", code=0, run=self._run)

    def _detached(self) -> Outcome:
        self._note("running")
        return Outcome(end="detached", code=0, run=self._run)

    def _stopped_elsewhere(
        self, code: int, errors: Mapping[str, HostError], running: tuple[str, ...], nodes: Sequence[Watched] = ()
    ) -> Outcome:
        if self.OWNS and not running:
            self._note("stopped", code, reason="topoplan runs stop", nodes=nodes)
        return Outcome(end="stopped", code=code, run=self._run, errors=errors, running=running)

    def _stop_all(
        self, watch: Watch | None = None, *, grace_s: float | None = None, only: Collection[str] | None = None
    ) -> dict[str, HostError]:
        """Stop the nodes, at once, and take in their last output. What could not be stopped."""
        settings = self._settings
        wanted = [node for node in self._nodes.values() if only is None or node.name in only]
        return stop_all(
            sorted(wanted, key=lambda node: node.node),
            settings if grace_s is None else replace(settings, grace_s=grace_s),
            reconnect=self._reconnect,
            at_once=lambda: self._interrupts() > int(self.OWNS),
            watch=watch,
        )

    def _measure(self, outcome: Outcome) -> None:
        """Note what the run measured, once it is over, and tell it."""
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

    def _note_drift(self, found: Drifted) -> None:
        """Keep it with the run, unless another process that watches has."""
        with contextlib.suppress(InputError, OutputError):
            known = records.load(self._run).drifts
            same = [one for one in known if (one.what, one.state) == (found.what, found.state)]
            if not any(one.step >= found.since_step for one in same):
                records.update(self._run, drifts=(*known, found))

    # ----------------------------------------------------------------------------------------------------- small things

    @property
    def _run(self) -> str:
        return self._record.run_id if self._is_noted else ""

    def _connect(self, on_failure: Callable[[str, HostError], None]) -> Hosts:
        """Log in to all hosts; by label, in the order of the targets."""

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
        """The result of a job, unless the user wants it to end. With `settle` what is under way is then waited for,
        within reason: it must not do anything after the others were stopped."""
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

    def _note(
        self,
        state: RunState,
        code: int | None = None,
        *,
        reason: str = "",
        nodes: Sequence[Watched] = (),
        left: tuple[str, ...] = (),
    ) -> None:
        """Bring the record up to date, where another process has not done so. A disk that is full now ends nothing: the
        hosts know how their jobs are."""
        if not self._is_noted:
            return
        codes = {node.name: node.code for node in nodes if node.code is not None}
        trouble = not_kept(nodes)
        told = (self._record.trouble, trouble)
        try:
            known = records.load(self._run)
            if known.state == "starting" and not self.OWNS:
                return
            words = self._mask.text(reason)
            self._record = note(
                known, state, code, reason=words, codes=codes, left=left, trouble=trouble, unless_over=not self.OWNS
            )
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))
        else:
            if self._record.trouble not in told:
                self._tell(Event(kind="note", text=self._record.trouble))

    def _step(self, step: str, text: str, **data: object) -> None:
        self._tell(Event(kind="step", text=text, data={"step": step, **data}))


def _unseen(nodes: Iterable[Watched]) -> dict[str, HostError]:
    """Why hosts cannot be seen, by node."""
    return {node.name: why for node in nodes if (why := node.unseen or node.lost) is not None}


def _not_ended(nodes: Iterable[Watched]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if not node.ended)
