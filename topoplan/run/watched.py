"""One node of a watched run: what is known of it, when its trouble began, and how it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.run.node import NodeState
from topoplan.run.record import NodeRecord, Started
from topoplan.run.shown import Tail


@dataclass(slots=True, kw_only=True)
class WatchedNode:
    """One node of a watched run, and what is known of it."""

    node: int
    """Rank among the nodes."""
    name: str
    """The node's label, such as `node-00`."""
    address: str
    """Address of the node's host."""
    run_dir: str
    started: Started | None = None
    """What the host reported when it started the job, if known."""
    connection: Connection | None
    """None if there is no connection yet, or if `given_up` is set from the start."""
    log: Path | None
    """Local copy of the log, byte for byte; None if it is not kept, or another process keeps it."""
    tail_lines: int | None = None
    """Number of earlier lines to show; None for all."""
    offset: int = 0
    """Bytes of the log that have arrived."""
    tail: Tail = field(default_factory=Tail)
    state: NodeState | None = None
    """The state that the host reported last."""
    start_later: Callable[[Connection], Started] | None = None
    """Starts the job if no host has confirmed it, the connection being lost; None once it must not start any more."""
    start_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `start_later` is running."""
    ended: bool = False
    """True once the job has ended and its whole log has arrived."""
    code: int | None = None
    """Exit code of the node's script, if there is one."""
    failure: str = ""
    """What is wrong with the node, as a phrase; empty while nothing is."""
    unreachable: HostError | None = None
    """Why the host cannot be seen now, or could not be until the end; retried until `given_up` is set."""
    unreachable_since_s: float | None = None
    """Time since which the host has not been seen."""
    given_up: HostError | None = None
    """Why the host was given up on."""
    log_copy_problem: str = ""
    """Why the local copy of the log is incomplete, if it was to be kept."""
    ended_at_s: float | None = None
    """Time of the job's end, or when that end or the loss of the connection was noticed."""

    @classmethod
    def of(
        cls, place: NodeRecord, connection: Connection | None, *, log: Path | None, tail_lines: int | None = None
    ) -> Self:
        """Return the watched node for a node of a run's record."""
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
    def is_over(self) -> bool:
        """Whether nothing more will come from the node."""
        return self.ended or self.given_up is not None

    @property
    def failed(self) -> bool:
        """Whether the run can no longer succeed because of this node."""
        return bool(self.failure)


def first_failure_s(nodes: Iterable[WatchedNode]) -> float:
    """Return the time of the first failure, in terms of `time.monotonic`. Raises ValueError if no node has failed."""
    return min(node.ended_at_s or 0.0 for node in nodes if node.failed)


def end_time_s(state: NodeState, now: float, noticed_s: float | None, unreachable_since_s: float | None) -> float:
    """Return the time of a job's end: an unseen one is as old as its host says; others were noticed, or came before."""
    if state.ended_s_ago is None:
        return noticed_s or now
    by_host = now - state.ended_s_ago
    return by_host if noticed_s is None or unreachable_since_s is not None else min(noticed_s, by_host)


def log_copy_problems(nodes: Iterable[WatchedNode]) -> str:
    """Return one line on why local copies of logs are incomplete; empty if all are complete."""
    lacking = (node for node in nodes if node.log_copy_problem)
    return "; ".join(
        f"the local copy of the log of {node.name} is incomplete: {node.log_copy_problem}" for node in lacking
    )


def failure_phrase(state: NodeState) -> str:
    """Return how a job failed, as a phrase; empty if it ended well."""
    if state.stopped:
        return f"was stopped by its host, because {state.stopped}"
    if state.state == "ended":
        if state.code is None:
            return "was ended by a signal"
        killed = f" (signal {state.code - 128})" if 128 < state.code < 160 else ""
        return f"ended with exit code {state.code}{killed}" if state.code else ""
    if state.state == "rebooted":
        return "its machine was rebooted during the run"
    if state.state == "never-started":
        return "was never started"
    if state.is_unreadable:
        return "its processes and its run directory are gone: how it ended is unknown"
    if state.pids:
        return "its first process was killed and left no exit code, while others were still running"
    return "its processes are gone and left no exit code: they were killed, or could not write it"
