"""Events during the launch and watching of a run, as values: `report.session` turns them into text or JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from topoplan.errors import HostError
from topoplan.run.progress import Status

EventKind = Literal[
    "step",  # a phase of the launch begins: connect, preflight, upload, start, watch, stop
    "host",  # one host has completed its part
    "new-key",  # the key of an unknown host was accepted
    "check",  # a preflight check that is not ok
    "output",  # complete lines of a node's output
    "bar",  # current state of a progress bar, whose line is not complete
    "progress",  # current state of the training
    "silence",  # no step has come for too long: what each rank wrote last
    "stacks",  # where the ranks are in their programs
    "drift",  # steps or memory have left their predicted range for a while, or are back in it
    "trial",  # one of several short runs begins, or has ended
    "measured",  # what the run measured, beside what was predicted, when it is over
    "note",  # information that requires no action
    "ended",  # the script of one node has ended
    "connection",  # a host cannot be seen, or can be again; or this machine is offline, or online again
    "failure",  # a node failed, or a host before anything ran on it
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    kind: EventKind
    text: str
    """Text for a human reader; for `output` and `bar` the output itself, for `progress` empty."""
    node: str = ""
    """Name of the node, such as `node-00`; empty if the event concerns all nodes."""
    status: Status | None = None
    """Only for `progress`: the status of the training."""
    data: dict[str, Any] = field(default_factory=dict)


def host_failure(node: str, error: HostError) -> Event:
    """Return the event for a host that failed to do its part."""
    data = {"host": error.host, "problem": error.problem, "what": error.what, "remedy": error.remedy}
    return Event(kind="failure", node=node, text=str(error), data=data)


Tell = Callable[[Event], None]
"""Receives events from any thread. Must not block on a terminal."""
