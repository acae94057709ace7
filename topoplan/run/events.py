"""What happens while a run is launched and watched, as values: `report.session` makes text or JSON of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from topoplan.errors import HostError
from topoplan.run.progress import Status

EventKind = Literal[
    "step",  # a part of the launch begins: connect, preflight, upload, start, watch, stop
    "host",  # one host has done its part
    "new-key",  # the key of an unknown host was accepted
    "check",  # a check of the preflight that is not ok
    "output",  # whole lines of a node's output
    "bar",  # the present state of a progress bar, whose line is not complete
    "progress",  # where training is
    "silence",  # no step has come for too long: what each rank wrote last
    "stacks",  # where ranks are in their programs
    "drift",  # steps or memory have left what was predicted for a while, or are back there
    "trial",  # one of several short runs begins, or has ended
    "measured",  # what the run took, beside what was predicted, when it is over
    "note",  # something to know, and nothing to do
    "ended",  # the script of one node has ended
    "connection",  # a host cannot be seen, or is again; or this machine is offline, or online again
    "failure",  # a node failed, or a host before anything ran on it
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    kind: EventKind
    text: str
    """For a person; of `output` and a `bar` that itself, and of `progress` nothing."""
    node: str = ""
    """Name of the node, such as `node-00`; empty where it is about all of them."""
    status: Status | None = None
    """Of `progress`: where it is."""
    data: dict[str, Any] = field(default_factory=dict)
    """More for programs."""


def host_failure(node: str, error: HostError) -> Event:
    """A host that did not do what it was asked to."""
    data = {"host": error.host, "problem": error.problem, "what": error.what, "remedy": error.remedy}
    return Event(kind="failure", node=node, text=str(error), data=data)


Tell = Callable[[Event], None]
"""Takes events, from any thread. Must not wait for a terminal."""
