"""Take a bundle to a running job: connect, check, upload, and start all nodes together.

Whatever was started on a host is stopped there again, unless the run ends well or is left running on purpose. The run's
record is written before anything starts anywhere, so `topoplan runs stop` can finish what this process could not.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from topoplan.errors import INTERRUPTED, HostError, HostProblem, InputError
from topoplan.hosts.needs import python_on
from topoplan.hosts.result import Outcome as HostOutcome
from topoplan.hosts.result import Result
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import retried, run_on_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.remote.upload import upload, with_modes
from topoplan.remote.waiting import Call, Deadline
from topoplan.run import programs
from topoplan.run import record as records
from topoplan.run.bundle_reader import Bundle, BundleNode
from topoplan.run.events import Event, Tell, host_failure
from topoplan.run.failure import FAILED, Failure
from topoplan.run.node import NO_PEERS, NodeState, Peers, node_state, start_node
from topoplan.run.outcome import grace_of_stop_s, record_end_of, record_stop_request
from topoplan.run.record import NodeRecord, RunRecord, Started
from topoplan.run.session import Interrupted, Outcome, Session
from topoplan.run.settings import Settings
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode
from topoplan.specs.cluster import Host
from topoplan.units import named

OWN_PARTS = 3
"""Trailing components of a run directory's path that belong to topoplan alone: the user's runs, the node, the run."""
_BY_USER = "Ctrl-C"
_EXITING_S, _EXITING_LOOK_S = 5.0, 0.5
"""Time for processes to exit after the script has ended, and the interval at which to check."""
_FOR_A_MOMENT: tuple[HostProblem, ...] = ("timeout",)
"""Problems that may be temporary on a host that accepted a login a moment ago."""

Preflight = Callable[[Mapping[str, Connection]], Sequence[Result]]
"""Checks the hosts, keyed by the user's names for them, before anything is uploaded."""


class LaunchSession(Session):
    """A session that starts the processes of a run."""

    OWNS_RUN: ClassVar[bool] = True

    def __init__(
        self,
        bundle: Bundle,
        targets: Mapping[str, Target],
        access: Access,
        *,
        settings: Settings,
        tell: Tell = lambda event: None,
        interrupts: Callable[[], int] = lambda: 0,
        ending: Callable[[], int] = lambda: 0,
        preflight: Preflight | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Store the arguments without contacting any host.

        `targets` are keyed by node name, and `secrets` are environment variables of the job. `ending` returns the
        number of the signal that is ending this program, or 0.
        """
        record, hidden = _new_record(bundle, targets), secrets.values()
        super().__init__(record, targets, access, settings, tell=tell, interrupts=interrupts, hidden=hidden)
        self._ending = ending
        self._runs = False
        """Whether the start phase is over; from then on the run may be left running."""
        self._bundle, self._planned = bundle, bundle.draft
        self._preflight, self._secrets = preflight, secrets
        self._all_started = True

    @property
    def _stops_on_failure(self) -> bool:
        return True

    def _begin(self) -> Outcome | None:
        return self._reach() or self._refuse_second_run() or self._check() or self._prepare() or self._start_all()

    def _start_all(self) -> Outcome | None:
        refused = self._upload() or self._start()
        if refused is not None:
            return refused
        grace_s = grace_of_stop_s(self._run, time.monotonic())
        if grace_s is not None:
            # The stop request may have been made before some nodes had started.
            left = self._stop_all(grace_s=grace_s)
            return self._stopped_elsewhere(FAILED, left, tuple(left))
        if self._settings.detach and self._all_started:
            self._end_if_interrupted()
            return self._detached()
        self._runs = True
        self._update_record("running")
        self._step("watch", f"running on {_hosts(len(self._bundle.nodes))}; Ctrl-C stops it", run=self._run)
        return None

    def _may_detach(self, watch: Watch) -> bool:
        """Whether this program has to end, or the run is to be detached and every host has confirmed its start."""
        return self._ending() > 0 or (self._settings.detach and all(node.state is not None for node in watch.nodes))

    def _detached(self) -> Outcome:
        outcome = super()._detached()
        return replace(outcome, end="left", code=self._ended_code) if self._ending() else outcome

    def _is_interrupted(self) -> bool:
        return super()._is_interrupted() or (self._ending() > 0 and (self._settings.stop_on_exit or not self._runs))

    @property
    def _ended_code(self) -> int:
        return 128 + self._ending() if self._ending() else INTERRUPTED

    # ------------------------------------------------------------------------------------------------- before the start

    def _reach(self) -> Outcome | None:
        self._step("connect", f"connecting to {_hosts(len(self._bundle.nodes))}")
        errors = self._connect(lambda name, error: self._tell(host_failure(name, error))).errors
        return Outcome(end="refused", code=FAILED, errors=errors) if errors else None

    def _refuse_second_run(self) -> Outcome | None:
        """Raise InputError if a run of this bundle still runs on one of its hosts: they would share port and output.

        A record may be old, so the hosts are asked; a run that has ended by their account is recorded as ended.
        """
        own = {place.host: self._connections[place.label] for place in self._record.nodes}
        for earlier in records.unfinished():
            places = {place.label: place for place in earlier.nodes if place.host in own}
            if earlier.bundle != self._record.bundle or not places:
                continue
            states = self._wait(partial(self._states_of, places, own))
            running = [places[label].name for label, state in states.items() if _is_running(state)]
            if running:
                run = earlier.run_id
                raise InputError(
                    f"run {run} of this bundle is still running on {named(running)}",
                    where=earlier.bundle,
                    remedy=f"`topoplan runs attach {run}` watches it, and `topoplan runs stop {run}` ends it",
                )
            with contextlib.suppress(InputError):
                record_end_of(earlier, states)
        return None

    def _states_of(
        self, places: Mapping[str, NodeRecord], hosts: Mapping[Host, Connection]
    ) -> dict[str, NodeState | HostError]:
        deadline_s = self._settings.stop_s

        def one(label: str, connection: Connection) -> NodeState:
            place = places[label]
            return node_state(connection, place.run_dir, started=place.started, deadline_s=deadline_s)

        connections = {label: hosts[place.host] for label, place in places.items()}
        return run_on_all(connections, one, deadline_s=deadline_s + 1)

    def _check(self) -> Outcome | None:
        if self._preflight is None:
            return None
        count, preflight = len(self._bundle.nodes), self._preflight
        self._step("preflight", f"checking {_hosts(count)}")
        connections = {self._targets[name].name: one for name, one in self._connections.items()}
        checks = self._wait(lambda: preflight(connections))
        # Results that are identical on several hosts are reported once.
        places: dict[tuple[HostOutcome, str, str, str], list[str]] = defaultdict(list)
        for check in checks:
            if check.outcome in ("warning", "failure"):
                places[check.outcome, check.name, check.what, check.remedy].append(check.host)
        for (outcome, name, what, remedy), hosts in places.items():
            on = f"all {count} hosts" if len(hosts) == count > 1 else ", ".join(filter(None, hosts))
            text = ": ".join(filter(None, (outcome, name, on, f"{what}; {remedy}" if remedy else what)))
            self._tell(Event(kind="check", text=text, data={"check": name, "hosts": hosts, "outcome": outcome}))
        failed = any(check.outcome == "failure" for check in checks)
        return Outcome(end="refused", code=FAILED) if failed else None

    def _prepare(self) -> Outcome | None:
        """Write the record of the run: from here on other processes can find it."""
        directory = records.create(self._record)
        self._has_record = True
        self._step("run", f"run {self._run}", run=self._run, directory=str(directory))
        return None

    def _upload(self) -> Outcome | None:
        self._step("upload", f"uploading the bundle to {_hosts(len(self._bundle.nodes))}")

        def one(place: NodeRecord, connection: Connection) -> None:
            files = with_modes(self._files_of(place))

            def put(left_s: float) -> None:
                host = self._connections[place.label]
                if self._give_up:
                    return
                if not host.is_alive:
                    host = self._reconnect(place.label, min(left_s, self._settings.connect_s))
                    self._connections[place.label] = host
                upload(host, files, place.run_dir, own_parts=OWN_PARTS, deadline_s=left_s)

            if (error := retried(put, self._settings.upload_s, also=_FOR_A_MOMENT)) is not None:
                raise error

        errors = _errors(self._wait(lambda: self._on_all(one, self._settings.upload_s), settle=True))
        if not errors:
            return None
        for name, error in errors.items():
            self._tell(host_failure(name, error))
        self._clean_up()
        self._update_record("failed", FAILED, reason=str(next(iter(errors.values()))))
        return Outcome(end="failed", code=FAILED, run=self._run, errors=errors)

    def _start(self) -> Outcome | None:
        self._step("start", f"starting {_hosts(len(self._bundle.nodes))}")

        peers = self._peers()

        def one(place: NodeRecord, connection: Connection) -> None:
            if self._give_up:
                raise Interrupted
            self._nodes[place.label] = WatchedNode.of(place, connection, log=self._record.log(place))
            self._nodes[place.label].started = self._start_one(place, peers, connection)

        try:
            errors = _errors(self._wait(lambda: self._on_all(one, self._settings.start_s), settle=True))
        finally:
            self._record_starts()
        unreachable = {name: error for name, error in errors.items() if error.problem == "lost" and name in self._nodes}
        if len(unreachable) == len(errors):
            # These hosts may or may not have started the job; the watch finds out, and starts it where it was not.
            for place in self._record.nodes:
                if (error := unreachable.get(place.label)) is not None:
                    node = self._nodes[place.label]
                    node.start_later, node.unreachable = partial(self._start_one, place, peers), error
            self._all_started = not unreachable
            return None
        for name, error in errors.items():
            self._tell(host_failure(name, error))
        left = self._stop_all()
        first, error = next(iter(errors.items()))
        self._update_record("failed", FAILED, reason=str(error), left=tuple(left))
        host = next(node.host.address for node in self._bundle.nodes if node.name == first)
        failure = Failure(node=first, host=host, what=f"not started: {error.what}")
        errors = {**left, **errors}
        return Outcome(end="failed", code=FAILED, run=self._run, failure=failure, errors=errors, running=tuple(left))

    def _start_one(self, place: NodeRecord, peers: Peers | None, connection: Connection) -> Started:
        return start_node(
            connection,
            run_dir=place.run_dir,
            script=place.script,
            environment=self._secrets,
            files=self._files_of(place),
            deadline_s=self._settings.start_s,
            supervision=NO_PEERS if peers is None else peers.lines(place.node, place.run_dir),
            python=python_on(self._bundle.nodes[place.node].host) or "",
        )

    def _record_starts(self) -> None:
        """Record what the hosts reported at the start, so that a later stop needs no file of theirs."""
        started = {name: node.started for name, node in self._nodes.items()}
        nodes = tuple(replace(node, started=started.get(node.label)) for node in self._record.nodes)
        try:
            self._record = records.update(self._run, nodes=nodes)
        except InputError as error:
            self._tell(Event(kind="note", text=str(error)))

    def _clean_up(self) -> None:
        """Remove the uploaded files from the hosts, where nothing was started."""

        def one(place: NodeRecord, connection: Connection) -> None:
            connection.run(programs.REMOVE, place.run_dir, deadline_s=self._settings.stop_s)

        self._settle(Call(lambda: self._on_all(one, self._settings.stop_s)))

    # ------------------------------------------------------------------------------------------------------- at the end

    def _finished(self, nodes: Sequence[WatchedNode]) -> Outcome:
        outcome = super()._finished(nodes)
        if outcome.end == "ended":
            self._tell_what_is_left(nodes)
        return replace(outcome, stepless=self._last_step is None)

    def _tell_what_is_left(self, nodes: Sequence[WatchedNode]) -> None:
        """Report processes that jobs left running after a good end: nobody else would notice that they hold GPUs."""
        # Processes that were there when the end was noticed may just be exiting, the supervisor of the node among them.
        asked = {node.name: node.connection for node in nodes if node.state and node.state.pids}
        deadline_s, deadline = self._settings.stop_s, Deadline(_EXITING_S)

        def one(name: str, connection: Connection) -> NodeState:
            node = self._nodes[name]
            return node_state(connection, node.run_dir, started=node.started, deadline_s=deadline_s)

        connections = {name: one for name, one in asked.items() if one is not None}
        while True:
            states = run_on_all(connections, one, deadline_s=deadline_s + 1)
            left = {name: state.pids for name, state in states.items() if isinstance(state, NodeState) and state.pids}
            if not left or deadline.left_s <= 0 or self._is_interrupted():
                break
            connections = {name: connections[name] for name in left}
            time.sleep(_EXITING_LOOK_S)
        for name, pids in left.items():
            count, named = len(pids), " ".join(map(str, pids))
            processes = f"{count} process{'es' if count > 1 else ''}"
            text = f"left {processes} running, {named}; `topoplan runs stop` stops them"
            self._tell(Event(kind="note", node=name, text=text, data={"pids": list(pids)}))

    def _interrupted(self, watch: Watch | None) -> Outcome:
        """Stop what was started, or remove what was uploaded."""
        left: dict[str, HostError] = {}
        if self._nodes:
            left = self._stop_all(watch)
        elif self._has_record:
            self._clean_up()
        code = self._ended_code
        if not left:
            reason = f"signal {self._ending()} to topoplan" if self._ending() else _BY_USER
            self._update_record("stopped", code, reason=reason, nodes=watch.nodes if watch is not None else ())
        return Outcome(end="interrupted", code=code, run=self._run, errors=left, running=tuple(left))

    def _stop_all(
        self, watch: Watch | None = None, *, grace_s: float | None = None, only: Collection[str] | None = None
    ) -> dict[str, HostError]:
        if self._is_interrupted():
            record_stop_request(self._run, self._settings.grace_s)
            self._step("stop", f"stopping {_hosts(len(self._nodes))}; Ctrl-C again quits at once")
        return super()._stop_all(watch, grace_s=grace_s, only=only)

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _on_all(self, job: Callable[[NodeRecord, Connection], None], deadline_s: float) -> dict[str, HostError | None]:
        places = {place.label: place for place in self._record.nodes}
        return run_on_all(
            self._connections, lambda name, connection: job(places[name], connection), deadline_s=deadline_s + 1
        )

    def _peers(self) -> Peers | None:
        """Return where the supervisors of the nodes meet; None for a single node, which has no peers to watch."""
        draft, count = self._bundle.draft, len(self._bundle.nodes)
        if count == 1 or draft.master_address is None:
            return None
        address, port, token = draft.master_address, draft.master_port, secrets.token_hex(16)
        return Peers(nodes=count, address=address, port=port, token=token, grace_s=self._settings.grace_s)

    def _files_of(self, place: NodeRecord) -> dict[str, bytes]:
        return self._bundle.files_of(self._bundle.nodes[place.node])


def _new_record(bundle: Bundle, targets: Mapping[str, Target]) -> RunRecord:
    run_id = records.new_run_id(bundle.run)
    return RunRecord(
        run_id=run_id,
        name=bundle.run,
        bundle=str(bundle.directory.resolve()),
        created=records.now_text(),
        nodes=tuple(_place(node, targets[node.name], run_id) for node in bundle.nodes),
    )


def _place(node: BundleNode, target: Target, run_id: str) -> NodeRecord:
    host = node.host
    # One directory per node, because hosts may share a file system. A relative path is below the user's home.
    own = (runs_directory_on(target), node.name, called_on_host(run_id))
    return NodeRecord(
        node=node.node,
        name=target.name,
        address=host.address,
        user=host.user,
        port=host.port,
        run_dir=posixpath.join(host.workdir or "", *own),
        script=node.script,
    )


def called_on_host(run_id: str) -> str:
    """Return the name of a run on a host, which nothing else has."""
    return f"{run_id}-{secrets.token_hex(8)}"


def runs_directory_on(target: Target) -> str:
    """Return the name of the user's directory of runs on a host, below its workdir (others may share that) or home."""
    return f"topoplan-runs-{re.sub(r'[^A-Za-z0-9._-]', '-', target.user)}"


def _is_running(state: NodeState | HostError) -> bool:
    return isinstance(state, NodeState) and state.state == "running"


def _errors(results: Mapping[str, object]) -> dict[str, HostError]:
    return {name: result for name, result in results.items() if isinstance(result, HostError)}


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count != 1 else ''}"
