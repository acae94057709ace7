"""Keep track of which hosts of a run can be seen, and report those that cannot.

Losing sight of a host is not a failure: the host may be well, and its job with it, so nothing here ends anything. The
loss is reported once and then rarely, each time with its duration. If no host can be seen, what they have in common is
this machine, so that is reported instead, and the time counts against no host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from topoplan.errors import HostError, HostProblem
from topoplan.run.events import Event, EventKind, Tell
from topoplan.units import named

REPORT_AFTER_S = 3.0
"""Delay before a report: a loss that heals is not worth a line, and the loss of all hosts is one line."""
REMIND_S = 60.0
"""Time from the first report to the second; doubled for every further one, up to `REMIND_AT_MOST_S`."""
REMIND_AT_MOST_S = 3600.0
_SILENT_S = 60.0
"""Running peers that have written nothing for this long may be waiting for a host that is dead."""
_NETWORK: frozenset[HostProblem] = frozenset({"unresolved", "unreachable", "timeout", "lost", "proxy"})
"""Problems in which nobody has answered."""
REFUSALS: frozenset[HostProblem] = frozenset({"auth", "key-unknown", "key-changed", "key-revoked", "protocol"})
"""Problems with hosts that answer, which waiting does not solve."""


def looks_offline(results: Mapping[str, object]) -> bool:
    """Whether none of several hosts has answered; then this machine is more likely to be offline."""
    return len(results) > 1 and all(
        isinstance(result, HostError) and result.problem in _NETWORK for result in results.values()
    )


def duration_text(seconds: float) -> str:
    """Return a duration as text: `40 s`, `5 min`, `3 h 20 min`; rounded down."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole if whole else round(seconds, 1)} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass(slots=True)
class _Outage:
    """One host that cannot be seen, or all of them; times are those of `time.monotonic`."""

    since_s: float
    counts_from_s: float
    """`since_s`, or when this machine was last back online."""
    why: str = ""
    answers: bool = False
    """Whether the host answers, but refuses the login or fails to do what it should."""
    told: bool = False
    due_s: float = 0.0
    """When to repeat the report."""
    pause_s: float = REMIND_S

    def is_due(self, now_s: float) -> bool:
        """Whether to report now, for the first time or again."""
        if now_s < (self.due_s if self.told else self.counts_from_s + REPORT_AFTER_S):
            return False
        if self.told:
            self.pause_s = min(2 * self.pause_s, REMIND_AT_MOST_S)
        self.due_s = now_s + self.pause_s
        return True


class Reachability:
    """Keeps track of the hosts of a run, and reports those that cannot be seen."""

    def __init__(
        self, addresses: Mapping[str, str], tell: Tell, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with all hosts in sight. `addresses` are keyed by node name."""
        self._addresses, self._tell, self._clock = addresses, tell, clock
        self._outages: dict[str, _Outage] = {}
        self._offline: _Outage | None = None

    def mark_unreachable(self, node: str, why: HostError) -> None:
        """Note that a node's host cannot be seen, or still cannot."""
        now_s = self._clock()
        one = self._outages.setdefault(node, _Outage(now_s, now_s))
        one.why, one.answers = why.what, why.problem not in _NETWORK

    def mark_reachable(self, node: str) -> None:
        """Note that a node's host is seen again."""
        was = self._outages.pop(node, None)
        self._end_offline()
        if was is not None and was.told:
            unreachable_s = self._clock() - was.since_s
            duration = duration_text(unreachable_s)
            text = f"connected to {self._addresses[node]} again after {duration}; no output was lost"
            self._say("back", text, node, unreachable_s)

    def forget(self, node: str) -> None:
        """Forget a node, because it is no longer looked for."""
        self._outages.pop(node, None)

    def unreachable_s(self, node: str) -> float:
        """Return how long a node's host has not been seen while others were; 0 if it is in sight."""
        found = self._outages.get(node)
        return self._clock() - found.counts_from_s if found is not None and self._offline is None else 0.0

    @property
    def offline_s(self) -> float:
        """How long no host at all has been seen; 0 while one is."""
        return self._clock() - self._offline.since_s if self._offline is not None else 0.0

    def look(self, *, any_seen: bool, running: Mapping[str, float]) -> None:
        """Make the reports that are due.

        `any_seen`: whether there is a connection to any host. `running`: seconds since the last output of nodes seen to
        run.
        """
        if not self._outages:
            return
        now_s = self._clock()
        if any_seen or any(one.answers for one in self._outages.values()):
            self._end_offline()
            for node, one in self._outages.items():
                if one.is_due(now_s):
                    self._report_host(node, one, now_s, running)
            return
        last = max(self._outages.values(), key=lambda one: one.since_s)
        if self._offline is None:
            first_s = min(one.since_s for one in self._outages.values())
            self._offline = _Outage(first_s, last.since_s, last.why)
        self._offline.why = last.why
        if self._offline.is_due(now_s):
            self._report_offline(self._offline, now_s)

    def _report_host(self, node: str, one: _Outage, now_s: float, running: Mapping[str, float]) -> None:
        address, unreachable_s = self._addresses[node], now_s - one.since_s
        if not one.told:
            text = f"{address} is unreachable ({one.why}); its job may still be running there"
            self._say("lost", f"{text}. Retrying", node, unreachable_s)
        else:
            text = f"{address} has been unreachable for {duration_text(unreachable_s)} ({one.why})"
            self._say("", f"{text}; {_peers(running)}", node, unreachable_s)
        one.told = True

    def _report_offline(self, one: _Outage, now_s: float) -> None:
        count, unreachable_s = len(self._addresses), now_s - one.since_s
        seems = "seems to" if count > 1 else "may"
        if not one.told:
            whose = f"none of the {count} hosts is reachable" if count > 1 else "its only host is unreachable"
            text = f"this machine {seems} be offline: {whose} ({one.why}); the run may still be going on there"
            self._say("offline", f"{text}. Retrying", "", unreachable_s)
        else:
            text = f"this machine still {seems} be offline, for {duration_text(unreachable_s)} now ({one.why})"
            self._say("", text, "", unreachable_s)
        one.told = True

    def _end_offline(self) -> None:
        was, self._offline = self._offline, None
        if was is None:
            return
        now_s = self._clock()
        for one in self._outages.values():
            one.counts_from_s = now_s
        if was.told:
            unreachable_s = now_s - was.since_s
            self._say("online", f"this machine is online again after {duration_text(unreachable_s)}", "", unreachable_s)

    def _say(self, state: str, text: str, node: str, unreachable_s: float) -> None:
        """Report a change of state, or with an empty `state` that it lasts."""
        data = {"state": state} if state else {}
        kind: EventKind = "connection" if state else "note"
        self._tell(Event(kind=kind, node=node, text=text, data={**data, "unseen_s": round(unreachable_s, 1)}))


def _peers(running: Mapping[str, float]) -> str:
    if not running:
        return "no other node is running; waiting for it"
    names = named(running)
    still = f"{names} still run{'s' if len(running) == 1 else ''}"
    silent_s = min(running.values())
    if silent_s < _SILENT_S:
        return f"{still}; waiting for it"
    return f"{still} but wrote nothing for {duration_text(silent_s)}; waiting for it until Ctrl-C"
