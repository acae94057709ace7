"""One node of a run that is watched: what is known of it, when its trouble began, and how it failed."""

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
class Watched:
    """One node of the run, and what is known of it."""

    node: int
    """Rank among the nodes."""
    name: str
    """`node-00`."""
    address: str
    """Its host."""
    run_dir: str
    started: Started | None = None
    """What its host said when it started it, where that is known."""
    connection: Connection | None
    """None where there is none yet, or `lost` is set from the start."""
    log: Path | None
    """Its log on this side, byte for byte, unless another process keeps it; None: it is not kept."""
    tail_lines: int | None = None
    """So many lines of the past are shown; None: all."""
    offset: int = 0
    """Bytes of the log that have come."""
    tail: Tail = field(default_factory=Tail)
    state: NodeState | None = None
    """What its host said last."""
    begin: Callable[[Connection], Started] | None = None
    """Starts it where it was not: the connection was lost before its host said that it was. Taken away once it must not
    start any more."""
    beginning: threading.Lock = field(default_factory=threading.Lock)
    """Held while that is under way."""
    ended: bool = False
    """Whether it has, and all that it wrote has come."""
    code: int | None = None
    """Exit code of its script, where it has one."""
    failure: str = ""
    """What is wrong with it, in a phrase; empty while nothing is."""
    unseen: HostError | None = None
    """Why its host cannot be seen now, or could not to the end; it is being tried until `lost` is set."""
    unseen_at: float | None = None
    """Moment from which on that is so."""
    lost: HostError | None = None
    """The same, once it is given up."""
    not_kept: str = ""
    """Why its log is not kept here to its end, where it was to be."""
    trouble_at: float | None = None
    """Moment of its end, or at which that or the loss of its connection was noticed."""

    @classmethod
    def of(
        cls, place: NodeRecord, connection: Connection | None, *, log: Path | None, tail_lines: int | None = None
    ) -> Self:
        """A node of the record of a run."""
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
    def over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.ended or self.lost is not None

    @property
    def failed(self) -> bool:
        """Whether the run cannot succeed any more because of it."""
        return bool(self.failure)


def failed_at(nodes: Iterable[Watched]) -> float:
    """Moment of the first failure, of `time.monotonic`. Raises ValueError where none has failed."""
    return min(node.trouble_at or 0.0 for node in nodes if node.failed)


def ended_at(state: NodeState, now: float, noticed: float | None, unseen_at: float | None) -> float:
    """Moment of an end. One that came unseen is as old as its host says; others were noticed, or are of before."""
    if state.ended_s_ago is None:
        return noticed or now
    by_host = now - state.ended_s_ago
    return by_host if noticed is None or unseen_at is not None else min(noticed, by_host)


def not_kept(nodes: Iterable[Watched]) -> str:
    """Why logs are not kept here to their end: one line, empty where all are."""
    lacking = (node for node in nodes if node.not_kept)
    return "; ".join(f"the log of {node.name} is not kept to its end: {node.not_kept}" for node in lacking)


def how_it_failed(state: NodeState) -> str:
    """In a phrase; empty where it ended well."""
    if state.stopped:
        return f"was ended on its host, as {state.stopped}"
    if state.state == "ended":
        if state.code is None:
            return "was ended by a signal"
        killed = f" (signal {state.code - 128})" if 128 < state.code < 160 else ""
        return f"ended with exit code {state.code}{killed}" if state.code else ""
    if state.state == "rebooted":
        return "its machine was started again meanwhile"
    if state.state == "never-started":
        return "was never started"
    if state.is_mute:
        return "its processes are gone, and so is its run directory: how it ended is not known"
    if state.pids:
        return "its first process is gone, without an exit code, and others still ran: somebody killed it"
    return "its processes are gone, without an exit code: they were killed, or could not write one"
