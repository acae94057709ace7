"""From a bundle to a running job and its end: connect, check, upload, start all together, watch, stop.

Every step before the watching has a deadline, and every step can be interrupted. What was started on a host is stopped
there again, unless the run ends well or is left running on purpose. A host that cannot be seen ends nothing. The record
of the run is written before anything starts anywhere, so that `topoplan stop` can finish what this process could not.
"""

from __future__ import annotations

import posixpath
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from topoplan.errors import HostError, InputError
from topoplan.hosts.check import Check
from topoplan.hosts.check import Outcome as CheckOutcome
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all, run_on_all
from topoplan.remote.keys import Access
from topoplan.remote.secrets import Mask
from topoplan.remote.ssh import CONNECT_S, connect
from topoplan.remote.ssh_config import Target
from topoplan.remote.upload import with_modes
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Call, Deadline
from topoplan.run import record as records
from topoplan.run.bundle_reader import Bundle, BundleNode
from topoplan.run.events import Event, Tell, host_failure
from topoplan.run.failure import FAILED, Failure, first_cause
from topoplan.run.node import node_state, start_node
from topoplan.run.outcome import note, note_stop, stopped_with_grace_s
from topoplan.run.progress import Progress
from topoplan.run.record import NodeRecord, RunRecord, RunState
from topoplan.run.stopping import StopTimes, let_be_stopped, stop_all
from topoplan.run.watch import Watch, Watched, not_kept

T = TypeVar("T")

OWN_PARTS = 3
"""Of the path of a run directory: the user's runs, the node and the run are directories of ours alone."""
INTERRUPTED = 130
_BY_USER = "Ctrl-C"

Preflight = Callable[[Mapping[str, Connection]], Sequence[Check]]
"""Checks the hosts, by the names that the user has for them, before anything is put there."""
End = Literal["ended", "failed", "stopped", "interrupted", "detached", "refused", "unknown"]
"""`stopped`: by somebody else, such as `topoplan stop`. `unknown`: no host could be seen for as long as was wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long each step may take, and what is wanted."""

    detach: bool = False
    """Return when all nodes have started."""
    grace_s: float = 10.0
    """Time between asking a node's processes to end and killing them."""
    connect_s: float = CONNECT_S
    upload_s: float = 120.0
    start_s: float = 30.0
    lost_after_s: float | None = None
    """A host that was not seen for so long is given up, and the run with it; None: never."""
    stop_s: float = 15.0
    """Time to stop a node, beside the grace."""
    drain_s: float = 5.0
    """Time for the last output of nodes that were stopped."""

    @property
    def stop_times(self) -> StopTimes:
        """Of stopping alone."""
        return StopTimes(grace_s=self.grace_s, stop_s=self.stop_s, drain_s=self.drain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch went."""

    end: End
    code: int
    """For the shell: the job's, 1 where no script said one, 130 when it was interrupted."""
    run: str = ""
    """Id of the run; empty where nothing was put on any host."""
    failure: Failure | None = None
    errors: Mapping[str, HostError] = field(default_factory=dict)
    """By node: what kept the launch from going on, or a node from being stopped or seen."""
    running: tuple[str, ...] = ()
    """Nodes on which something of the run may still be running."""


class Interrupted(Exception):  # noqa: N818  what the user asked for is no error
    """The user wants it to end."""


class Launch:
    """One launch of a bundle. `go` does all of it; call it once."""

    def __init__(
        self,
        bundle: Bundle,
        targets: Mapping[str, Target],
        access: Access,
        *,
        settings: Settings,
        tell: Tell = lambda event: None,
        interrupts: Callable[[], int] = lambda: 0,
        preflight: Preflight | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Touch nothing yet.

        `targets` are by names of nodes. `interrupts` says how often the user has asked to end: once stops the job,
        twice leaves at once. `secrets` are variables of the job; their values are in nothing that is told or noted.
        """
        self.bundle = bundle
        self.nodes = {node.name: node for node in bundle.nodes}
        self._targets, self._access, self._settings = targets, access, settings
        self._secrets, self._mask = secrets, Mask(secrets.values())
        self._tell: Tell = lambda event: tell(self._mask.value(event))
        self._interrupts = interrupts
        self._preflight = preflight
        self._connections: dict[str, Connection] = {}
        self._run_dirs: dict[str, str] = {}
        self._touched: dict[str, Watched] = {}
        """Nodes on which the start was tried; their connections are the latest."""
        self._all_started = True
        """Whether all hosts have said so."""
        self._give_up = False
        self._record: RunRecord | None = None
        self._logs = Path()

    def go(self) -> Outcome:
        """Do it, and say how it went. Nothing that was started is left behind unsaid."""
        outcome = self._to_its_end()
        errors = {name: self._mask.error(error) for name, error in outcome.errors.items()}
        return replace(outcome, failure=self._mask.value(outcome.failure), errors=errors)

    def _to_its_end(self) -> Outcome:
        try:
            return self._go()
        except Interrupted:
            self._give_up = True
            return self._stopped_by_user()
        except Exception:
            self._stop_all()
            raise
        finally:
            latest = [node.connection for node in list(self._touched.values())]
            for connection in (*self._connections.values(), *latest):
                if connection is not None:
                    connection.close()

    def _go(self) -> Outcome:
        refused = self._connect() or self._check() or self._prepare() or self._upload() or self._start()
        if refused is not None:
            return refused
        grace_s = stopped_with_grace_s(self._run, time.monotonic())
        if grace_s is not None:
            # Whoever asked may have come before some had started.
            return self._stopped_elsewhere(FAILED, self._stop_all(grace_s=grace_s))
        if self._settings.detach and self._all_started:
            self._end_if_interrupted()
            return self._detached()
        return self._watch()

    def _detached(self) -> Outcome:
        self._note("running")
        return Outcome(end="detached", code=0, run=self._run)

    # ------------------------------------------------------------------------------------------------ before the start

    def _connect(self) -> Outcome | None:
        self._step("connect", f"connecting to {_hosts(len(self.nodes))}")

        def done(name: str, result: Connection | HostError) -> None:
            if isinstance(result, HostError):
                self._host_failed(name, result)
            elif self._give_up:
                result.close()

        results = self._wait(
            lambda: connect_all(self._targets, self._access, deadline_s=self._settings.connect_s, on_done=done)
        )
        self._connections = {name: one for name, one in results.items() if isinstance(one, Connection)}
        return self._refused(_errors(results))

    def _check(self) -> Outcome | None:
        if self._preflight is None:
            return None
        self._step("preflight", f"checking {_hosts(len(self.nodes))}")
        preflight = self._preflight
        connections = {self._targets[name].name: one for name, one in self._connections.items()}
        checks = self._wait(lambda: preflight(connections))
        # What is alike on several hosts is said once.
        places: dict[tuple[CheckOutcome, str, str, str], list[str]] = defaultdict(list)
        for check in checks:
            if check.outcome in ("warning", "failure"):
                places[check.outcome, check.name, check.what, check.remedy].append(check.host)
        for (outcome, name, what, remedy), hosts in places.items():
            on = f"all {len(hosts)} hosts" if len(hosts) == len(self.nodes) > 1 else ", ".join(filter(None, hosts))
            text = ": ".join(filter(None, (outcome, name, on, f"{what}; {remedy}" if remedy else what)))
            self._tell(Event(kind="check", text=text, data={"check": name, "hosts": hosts, "outcome": outcome}))
        if any(check.outcome == "failure" for check in checks):
            return Outcome(end="refused", code=FAILED)
        return None

    def _prepare(self) -> Outcome | None:
        """Name the run and its directories, and note it: from here on others can find it."""
        run_id = records.new_run_id(self.bundle.run)
        for name, node in self.nodes.items():
            # A directory for each node: hosts may share the file system. A relative one is in the user's home.
            own = (runs_directory(self._targets[name]), name, f"{run_id}-{secrets.token_hex(8)}")
            self._run_dirs[name] = posixpath.join(node.host.workdir or "", *own)
        record = RunRecord(
            run_id=run_id,
            name=self.bundle.run,
            bundle=str(self.bundle.directory.resolve()),
            created=records.now_text(),
            nodes=tuple(self._noted(node) for node in self.bundle.nodes),
        )
        self._logs = records.create(record)
        self._record = record
        self._step("run", f"run {run_id}", run=run_id, directory=str(self._logs))
        return None

    def _upload(self) -> Outcome | None:
        self._step("upload", f"putting the bundle on {_hosts(len(self.nodes))}")

        def one(name: str, connection: Connection) -> None:
            files = with_modes(self.bundle.files_of(self.nodes[name]))
            if not self._give_up:
                deadline_s = self._settings.upload_s
                connection.upload(files, self._run_dirs[name], own_parts=OWN_PARTS, deadline_s=deadline_s)

        errors = _errors(self._wait(lambda: self._on_all(one, self._settings.upload_s), settle=True))
        if not errors:
            return None
        for name, error in errors.items():
            self._host_failed(name, error)
        self._clean_up()
        return self._failed_before(errors)

    def _start(self) -> Outcome | None:
        self._step("start", f"starting {_hosts(len(self.nodes))}")

        def one(name: str, connection: Connection) -> None:
            if self._give_up:
                raise Interrupted
            self._touched[name] = Watched(
                node=self.nodes[name].node,
                name=name,
                address=self.nodes[name].host.address,
                run_dir=self._run_dirs[name],
                connection=connection,
                log=self._logs / f"{name}.log",
            )
            self._touched[name].started = start_node(
                connection,
                run_dir=self._run_dirs[name],
                script=self.nodes[name].script,
                environment=self._secrets,
                files=self.bundle.files_of(self.nodes[name]),
                deadline_s=self._settings.start_s,
            )

        try:
            errors = _errors(self._wait(lambda: self._on_all(one, self._settings.start_s), settle=True))
        finally:
            self._note_started()
        unseen = {name: error for name, error in errors.items() if error.problem == "lost" and name in self._touched}
        if len(unseen) == len(errors):
            # They may have started it, or not; who watches will see.
            for name, error in unseen.items():
                self._touched[name].starting, self._touched[name].unseen = True, error
            self._all_started = not unseen
            return None
        for name, error in errors.items():
            self._host_failed(name, error)
        left = self._stop_all()
        first = next(iter(errors))
        self._note("failed", FAILED, reason=str(errors[first]))
        return Outcome(
            end="failed",
            code=FAILED,
            run=self._run,
            failure=Failure(node=first, host=self.nodes[first].host.address, what=f"not started: {errors[first].what}"),
            errors={**left, **errors},
            running=tuple(left),
        )

    def _note_started(self) -> None:
        """Note what the hosts have said: who stops the run later needs no file of it then."""
        if self._record is None:
            return
        started = {name: node.started for name, node in self._touched.items()}
        nodes = tuple(replace(node, started=started.get(node.label)) for node in self._record.nodes)
        try:
            self._record = records.update(self._run, nodes=nodes)
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))

    def _clean_up(self) -> None:
        """Remove what was uploaded, where nothing was started: nobody needs it."""
        script = '[ -e "$1/.topoplan" ] || rm -rf -- "$1"; rmdir -- "${1%/*}" 2>/dev/null || true'

        def one(name: str, connection: Connection) -> None:
            connection.run(script, self._run_dirs[name], deadline_s=self._settings.stop_s)

        self._settle(Call(lambda: self._on_all(one, self._settings.stop_s)))

    # ------------------------------------------------------------------------------------------------ while it runs

    def _watch(self) -> Outcome:
        self._note("running")
        self._step("watch", f"running on {_hosts(len(self.nodes))}; Ctrl-C stops it", run=self._run)
        watch = Watch(
            [self._touched[name] for name in self.nodes],
            tell=self._tell,
            reconnect=self._reconnect,
            lost_after_s=self._settings.lost_after_s,
            progress=Progress.of(self.bundle.recorded.spec, self.bundle.recorded.plan),
        )

        def may_leave() -> bool:
            """Once all hosts have said that they have started it."""
            return self._settings.detach and all(node.state is not None for node in watch.nodes)

        try:
            watch.until(
                lambda: (
                    self._interrupts() > 0 or any(node.failed for node in watch.nodes) or watch.is_blind or may_leave()
                )
            )
            if any(node.failed for node in watch.nodes):
                return self._first_failure(watch)
            if self._interrupts():
                return self._interrupted(self._stop_all(watch), watch)
            if may_leave():
                return self._detached()
            if watch.is_blind:
                return self._unknown(watch)
            self._note("ended", 0, watch=watch)
            self._tell_what_is_left(watch)
            return Outcome(end="ended", code=0, run=self._run)
        finally:
            watch.close()

    def _first_failure(self, watch: Watch) -> Outcome:
        """Stop the others, and say who was first and why."""
        ranks = self.bundle.recorded.spec.cluster.gpus_per_node
        found = first_cause(watch, ranks_per_node=ranks, tell=self._tell, leave=lambda: self._interrupts() > 0)
        failure, code = found or (None, FAILED)
        times = self._settings.stop_times
        if let_be_stopped(watch, self._run, times, tell=self._tell, leave=lambda: self._interrupts() > 0):
            return self._stopped_elsewhere(code, self._stop_all(watch), watch)
        running = [node.name for node in watch.nodes if not node.over]
        if running:
            self._step("stop", f"stopping {', '.join(running)}")
        left = self._stop_all(watch)
        reason = failure.reason if failure is not None else ""
        self._note("failed", code, reason="; not stopped: ".join(filter(None, (reason, ", ".join(left)))), watch=watch)
        return Outcome(end="failed", code=code, run=self._run, failure=failure, errors=left, running=tuple(left))

    def _unknown(self, watch: Watch) -> Outcome:
        """Nobody can be asked any more. The run goes on where it does, and so does its record."""
        return Outcome(
            end="unknown",
            code=FAILED,
            run=self._run,
            errors={node.name: node.unseen for node in watch.nodes if node.unseen is not None},
            running=tuple(node.name for node in watch.nodes if not node.over),
        )

    def _tell_what_is_left(self, watch: Watch) -> None:
        """What jobs that ended well have left running: nobody else would notice that it holds GPUs."""
        # What was there when the end was noticed may just have been ending.
        asked = {node.name: node.connection for node in watch.nodes if node.state and node.state.pids}
        states = run_on_all(
            {name: one for name, one in asked.items() if one is not None},
            lambda name, one: node_state(
                one, self._run_dirs[name], started=self._touched[name].started, deadline_s=self._settings.stop_s
            ),
            deadline_s=self._settings.stop_s + 1,
        )
        for name, state in states.items():
            if not isinstance(state, HostError) and state.pids:
                count, pids = len(state.pids), " ".join(map(str, state.pids))
                processes = f"{count} process{'es' if count > 1 else ''}"
                text = f"left {processes} running, {pids}; `topoplan stop` ends what is left"
                self._tell(Event(kind="note", node=name, text=text, data={"pids": list(state.pids)}))

    def _reconnect(self, name: str, deadline_s: float) -> Connection:
        return connect(self._targets[name], self._access, deadline_s=deadline_s)

    # ------------------------------------------------------------------------------------------------ the end

    def _stopped_by_user(self) -> Outcome:
        """An interruption before all nodes were watched."""
        if not self._touched:
            if self._record is None:
                return Outcome(end="interrupted", code=INTERRUPTED)
            self._clean_up()
            self._note("stopped", INTERRUPTED, reason=_BY_USER)
            return Outcome(end="interrupted", code=INTERRUPTED, run=self._run)
        return self._interrupted(self._stop_all())

    def _stopped_elsewhere(self, code: int, left: Mapping[str, HostError], watch: Watch | None = None) -> Outcome:
        if not left:
            self._note("stopped", code, reason="topoplan stop", watch=watch)
        return Outcome(end="stopped", code=code, run=self._run, errors=left, running=tuple(left))

    def _interrupted(self, left: Mapping[str, HostError], watch: Watch | None = None) -> Outcome:
        if not left:
            self._note("stopped", INTERRUPTED, reason=_BY_USER, watch=watch)
        return Outcome(end="interrupted", code=INTERRUPTED, run=self._run, errors=left, running=tuple(left))

    def _stop_all(self, watch: Watch | None = None, *, grace_s: float | None = None) -> dict[str, HostError]:
        """Stop what was started on all hosts, at once, and take in its last output. What could not be stopped."""
        if self._interrupts():
            note_stop(self._run, self._settings.grace_s)
            self._step("stop", f"stopping {_hosts(len(self._touched))}; Ctrl-C again leaves at once")
        times = self._settings.stop_times
        return stop_all(
            [self._touched[name] for name in sorted(self._touched)],
            replace(times, grace_s=times.grace_s if grace_s is None else grace_s),
            reconnect=self._reconnect,
            at_once=lambda: self._interrupts() > 1,
            watch=watch,
        )

    # ------------------------------------------------------------------------------------------------ small things

    @property
    def _run(self) -> str:
        return self._record.run_id if self._record is not None else ""

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

    def _end_if_interrupted(self) -> None:
        if self._interrupts():
            self._give_up = True
            raise Interrupted

    def _settle(self, call: Call[T]) -> None:
        deadline = Deadline(self._settings.stop_s)
        while not call.done.wait(INTERRUPT_LOOK_S) and deadline.left_s > 0 and self._interrupts() < 2:
            pass

    def _on_all(self, job: Callable[[str, Connection], None], deadline_s: float) -> dict[str, HostError | None]:
        return run_on_all(self._connections, job, deadline_s=deadline_s + 1)

    def _refused(self, errors: Mapping[str, HostError]) -> Outcome | None:
        return Outcome(end="refused", code=FAILED, errors=errors) if errors else None

    def _failed_before(self, errors: Mapping[str, HostError]) -> Outcome:
        """A host failed before anything was started on any."""
        self._note("failed", FAILED, reason=str(next(iter(errors.values()))))
        return Outcome(end="failed", code=FAILED, run=self._run, errors=errors)

    def _noted(self, node: BundleNode) -> NodeRecord:
        host = node.host
        return NodeRecord(
            node=node.node,
            name=self._targets[node.name].name,
            address=host.address,
            user=host.user,
            port=host.port,
            run_dir=self._run_dirs[node.name],
            script=node.script,
        )

    def _note(self, state: RunState, code: int | None = None, *, reason: str = "", watch: Watch | None = None) -> None:
        """Bring the record up to date. A disk that is full now ends nothing: the hosts know how their jobs are."""
        if self._record is None:
            return
        codes = {node.name: node.code for node in watch.nodes} if watch is not None else {}
        trouble = not_kept(watch.nodes) if watch is not None else ""
        told = (self._record.trouble, trouble)
        try:
            words = self._mask.text(reason)
            self._record = note(self._record, state, code, reason=words, codes=codes, trouble=trouble)
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))
        else:
            if self._record.trouble not in told:
                self._tell(Event(kind="note", text=self._record.trouble))

    def _step(self, step: str, text: str, **data: object) -> None:
        self._tell(Event(kind="step", text=text, data={"step": step, **data}))

    def _host_failed(self, name: str, error: HostError) -> None:
        self._tell(host_failure(name, error))


def runs_directory(target: Target) -> str:
    """The name of the directory of all runs on a host, below its workdir or the user's home: each user's own, because
    several may have the same workdir."""
    return f"topoplan-runs-{re.sub(r'[^A-Za-z0-9._-]', '-', target.user)}"


def _errors(results: Mapping[str, object]) -> dict[str, HostError]:
    return {name: result for name, result in results.items() if isinstance(result, HostError)}


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count != 1 else ''}"
