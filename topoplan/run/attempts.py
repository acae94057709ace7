"""Restart a run after a failure: which failures are worth it, and how much work was lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from topoplan.bundle.node_script import GOES_ON
from topoplan.errors import HostError, HostProblem, InputError
from topoplan.remote.waiting import Deadline
from topoplan.run import record as records
from topoplan.run.events import Event, Tell
from topoplan.run.failure import Failure
from topoplan.run.launch import LaunchSession, called_on_host
from topoplan.run.outcome import grace_of_stop_s
from topoplan.run.reachability import duration_text
from topoplan.run.record import Attempt, RunRecord
from topoplan.run.session import Outcome
from topoplan.run.watched import WatchedNode

RETRYABLE_KINDS = frozenset(
    {
        *("lost", "killed", "terminated", "abort", "crash", "hang"),
        *("nccl", "nccl-peer", "nccl-timeout", "network", "rendezvous"),
        *("gpu-broken", "gpu-fault"),
    }
)
"""Kinds of causes that another start may not meet again; a fault in input, software, disks or memory will recur.

A rank that was `killed` without a word in the logs is among them: it may have been memory, but also a person or program
on that machine. With a word of it, the kind is `host-memory`.
"""
_HEAD_BYTES = 256 * 1024
"""Size of the beginning of a log, in which the node script says where the trainer resumes."""
_CHECKED_EVENTS = 5
"""Number of progress events to check: what other nodes wrote before the first one may arrive a moment later."""
_RECHECK_S = 1.0
"""Pause between attempts to ask the hosts whether anything of a run is left."""
_MAY_RECOVER: frozenset[HostProblem] = frozenset(
    {"unresolved", "unreachable", "refused", "timeout", "proxy", "banner", "lost", "deadline"}
)
_RESUMES = re.compile(rf"^node-[0-9]+\.sh: {re.escape(GOES_ON)} .*?(?P<step>[0-9]{{1,12}})$", re.MULTILINE)


def is_retryable(failure: Failure | None) -> bool:
    """Whether a restart of the run may succeed."""
    return failure is not None and failure.diagnosis is not None and failure.diagnosis.kind in RETRYABLE_KINDS


def resumed_at_step(log: Path) -> int | None:
    """Return the step from which a trainer resumed, according to the copy of the first node's log; None if unknown."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            found = _RESUMES.search(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return int(found["step"]) if found else None


def lost_steps(attempts: Sequence[Attempt], last_first_step: int | None) -> int:
    """Return steps that had to be repeated. `last_first_step` is the first step of the last attempt."""
    begins = [*(attempt.first_step for attempt in attempts[1:]), last_first_step]
    return sum(max(0, (one.last_step or 0) - (step or 0)) for one, step in zip(attempts, begins, strict=True))


class RetryingLaunch(LaunchSession):
    """A launch that restarts the run after a failure that is worth it, as often as the settings allow."""

    WAIT_REASON: ClassVar[str] = "the restart waits until nothing of the run can be left"

    def _watch(self) -> Outcome:
        self._tell = self._with_checkpoint_check(self._tell)
        if not self._settings.retries:
            return super()._watch()
        with launch_lock(self._record):
            return self._watch_attempts()

    def _with_checkpoint_check(self, tell: Tell) -> Tell:
        """Wrap `tell` to report, during the first steps of each attempt, nodes that resumed from different steps."""
        looked: Counter[int] = Counter()

        def with_them(event: Event) -> None:
            tell(event)
            attempt = len(self._record.attempts)
            if event.kind != "progress" or looked[attempt] >= _CHECKED_EVENTS:
                return
            looked[attempt] += 1
            begins = {node.label: resumed_at_step(self._record.log(node)) for node in self._record.nodes}
            said = [f"{name} from step {step}" for name, step in begins.items() if step is not None]
            if len({*begins.values()} - {None}) > 1:
                text = f"the nodes resume from different checkpoints, {', '.join(said)}: all must share one output_dir"
                tell(Event(kind="note", text=text))
                looked[attempt] = _CHECKED_EVENTS

        return with_them

    def _watch_attempts(self) -> Outcome:
        outcome = super()._watch()
        while self._is_worth_another(outcome):
            if (ended := self._restart(outcome)) is not None:
                outcome = ended
                break
            outcome = super()._watch()
        attempts = self._record.attempts
        lost = lost_steps(attempts, self._resumed_at_step()) if attempts else 0
        return replace(outcome, attempts=attempts, lost_steps=lost)

    def _is_worth_another(self, outcome: Outcome) -> bool:
        """Whether to restart: only if all nodes are known to have started, as a pending start could happen later."""
        return (
            outcome.end == "failed"
            and len(self._record.attempts) < self._settings.retries
            and is_retryable(outcome.failure)
            and all(node.started is not None for node in self._nodes.values())
            and not self._is_interrupted()
        )

    def _record_failure(self, outcome: Outcome, nodes: Sequence[WatchedNode] = ()) -> None:
        if not self._is_worth_another(outcome):
            super()._record_failure(outcome, nodes)

    def _restart(self, failed: Outcome) -> Outcome | None:
        """Restart the run once nothing of the failed attempt is left anywhere; the outcome if that is not possible."""
        self._runs = False
        self._restore_record()
        ended = self._wait_until_nothing_is_left(failed)
        if ended is not None:
            return ended
        self._record_attempt(failed)
        deadline, waits = Deadline(self._settings.back_s), False
        while True:
            outcome = self._reconnect_all(quiet=waits) or self._start_all()
            if outcome is None or not outcome.errors or outcome.running:
                return outcome
            may_be_back = all(error.problem in _MAY_RECOVER for error in outcome.errors.values())
            if not may_be_back or deadline.left_s <= 0:
                break
            if not waits:
                self._tell_of_waiting(outcome.errors, "the restart waits until all hosts are reachable")
            if outcome.end != "refused":
                self._record_new_start()
            waits = True
            time.sleep(_RECHECK_S)
            ended = self._wait_until_nothing_is_left(replace(failed, errors={}))
            if ended is not None:
                return ended
        if outcome.end == "refused":
            outcome = replace(failed, errors=outcome.errors)
            super()._record_failure(outcome)
        return outcome

    def _reconnect_all(self, *, quiet: bool) -> Outcome | None:
        """Log in to all hosts again; the outcome if one cannot be reached. `quiet` suppresses events."""
        for connection in {*self._connections.values(), *(node.connection for node in self._nodes.values())}:
            if connection is not None:
                connection.close()
        self._nodes = {}
        tell = self._tell
        try:
            self._tell = (lambda event: None) if quiet else tell
            return self._reach()
        finally:
            self._tell = tell

    def _record_new_start(self, **changes: Any) -> None:
        nodes = []
        for node in self._record.nodes:
            parent, name = posixpath.split(node.run_dir)
            run_dir = posixpath.join(parent, called_on_host(name.rpartition("-")[0]))
            nodes.append(replace(node, run_dir=run_dir, started=None, code=None))
        fresh: dict[str, Any] = {"nodes": tuple(nodes), "state": "starting", "code": None, "ended": None, "reason": ""}
        self._record = records.update(self._run, **fresh, **changes)

    def _tell_of_waiting(self, errors: Mapping[str, HostError], until: str) -> None:
        hosts = ", ".join(f"{name} ({error.what})" for name, error in errors.items())
        text = f"{until}; waiting up to {duration_text(self._settings.back_s)} for {hosts}"
        self._tell(Event(kind="note", text=text))

    def _wait_until_nothing_is_left(self, failed: Outcome) -> Outcome | None:
        """Wait until no process of the run is left; return an outcome if the run is stopped or the wait is in vain."""
        left, deadline = dict(failed.errors), Deadline(self._settings.back_s)
        if left:
            self._tell_of_waiting(left, self.WAIT_REASON)
        while True:
            self._end_if_interrupted()
            asked = grace_of_stop_s(self._run, time.monotonic()) is not None
            if asked or records.load(self._run).state == "stopped":
                return self._stopped_elsewhere(failed.code, left, tuple(left))
            if not left:
                return None
            if deadline.left_s <= 0 or any(error.problem == "command" for error in left.values()):
                outcome = replace(failed, errors=left, running=tuple(left))
                super()._record_failure(outcome)
                return outcome
            time.sleep(_RECHECK_S)
            left = self._stop_all(only=left)

    def _restore_record(self) -> None:
        """Write the record again if somebody has removed it. Raises OutputError if it cannot be written."""
        try:
            records.load(self._run)
        except InputError as error:
            self._tell(Event(kind="note", text=f"{error}: its record is restored"))
            records.create(self._record)

    def _record_attempt(self, failed: Outcome) -> None:
        failure, known = failed.failure, self._record
        if failure is None or failure.diagnosis is None:
            raise ValueError("only what has a cause is started again")
        reason = self._mask.text(f"{failure.reason}: {failure.diagnosis.cause}")
        attempt = Attempt(
            ended=records.now_text(),
            node=failure.node,
            host=failure.host,
            reason=reason,
            first_step=self._resumed_at_step(),
            last_step=self._last_step,
            run_dirs=tuple(node.run_dir for node in known.nodes),
        )
        count = len(known.attempts) + 1
        text = f"{reason}; restarting the run, {count} of {self._settings.retries}"
        self._step("again", text, attempt=count, node=failure.node, host=failure.host)
        # In one step: a process that is also watching reads the record as soon as there is one more attempt.
        self._record_new_start(attempts=(*known.attempts, attempt))

    def _resumed_at_step(self) -> int | None:
        return resumed_at_step(self._record.log(self._record.nodes[0]))


def _lock_file(record: RunRecord) -> Path:
    return record.directory() / "launch.lock"


@contextlib.contextmanager
def launch_lock(record: RunRecord) -> Iterator[None]:
    """Let other processes see that this one manages the run; the system releases the lock when this one ends.

    Without effect where files cannot be locked.
    """
    handle = None
    try:
        with contextlib.suppress(OSError):
            handle = os.open(_lock_file(record), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def is_launch_alive(record: RunRecord) -> bool:
    """Whether another process manages the run, and may restart it."""
    try:
        handle = os.open(_lock_file(record), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several checks may run at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
