"""Detect step times or memory that have left their predicted range for good, and report the likely reasons once.

Step times are compared with the upper end of their band by a cumulative sum (Page, Biometrika 41, 1954): the excess of
each interval in standard deviations, less a half, never below zero. A mean within the band makes the sum fall, however
much single steps scatter, and one interval adds little, however long it is. The sum also tells at which step the drift
began. First steps, evaluations and checkpoints are left out, as they are of every mean.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any, Literal

from topoplan.planner.fragmentation import Peaks, predicted_bytes
from topoplan.planner.logged import Interval
from topoplan.planner.plan import Plan
from topoplan.remote.connection import Connection
from topoplan.remote.waiting import Call
from topoplan.run.events import Event, Tell
from topoplan.run.progress import Progress
from topoplan.run.record import Drifted, now_text
from topoplan.run.strain import load_texts
from topoplan.specs.spec import Spec
from topoplan.trainers.log import Log, pieces, quantity
from topoplan.trainers.registry import TRAINERS, trainer_named
from topoplan.units import GIB, in_seconds

_WARM_UP = 5
"""Steps after the first one seen during which kernels are compiled and the allocator fills."""
_LEAST_S = 60.0
_ALLOWANCE, _THRESHOLD, _LARGEST = 0.5, 12.0, 3.0
"""In standard deviations: the allowance per interval, the threshold for a report, the most that one interval adds. With
a mean at the very end of the band, a false report takes a million intervals on average (Siegmund 1985, (2.57))."""
_SCATTER = 30
_LEAST_SCATTER = 0.02
"""Smallest standard deviation, as a fraction of the bound: intervals are not timed more precisely."""
_REFERENCE_INTERVALS = 20
_REFERENCE_FACTOR = 1.25
_RISES, _GROWTH = 3, 1.02
"""Memory counts as growing if its peak has risen this many times since the first steps, and by this factor."""
_DATA_SHARE = 0.5
"""Data loading is named as a cause if it accounts for this fraction of the slowdown."""
_PEEK_EVERY_S = 60.0


def reserved_prediction(spec: Spec, plan: Plan) -> tuple[float, float]:
    """Return the bytes that PyTorch is predicted to reserve on the GPU that is logged, and how much more there may be,
    as a fraction."""
    of_first = plan.trainer is not None and trainer_named(plan.trainer).log.peaks_of_rank_0
    _, reserved_bytes = predicted_bytes(Peaks(spec=spec, layout=plan.layout, stage=0 if of_first else None))
    return reserved_bytes, plan.memory.reserved_band


@dataclass(slots=True)
class _Stretch:
    """Consecutive intervals that are, on the whole, beyond a bound."""

    level: float = 0.0
    since: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, interval: Interval, above: float) -> None:
        """Add an interval that lies `above` standard deviations beyond the bound."""
        self.level = max(0.0, self.level + min(above, _LARGEST) - _ALLOWANCE)
        if not self.level:
            self.steps, self.seconds = 0, 0.0
            return
        if not self.steps:
            self.since = interval.last - interval.steps + 1
        self.steps += interval.steps
        self.seconds += interval.seconds

    @property
    def is_long(self) -> bool:
        """Whether the stretch is long enough to be reported."""
        return self.level > _THRESHOLD and self.seconds >= _LEAST_S

    @property
    def each_s(self) -> float:
        """Mean seconds per step in the stretch."""
        return self.seconds / self.steps


class DriftDetector:
    """Compares step times, memory and data loading times in the nodes' logs with the prediction."""

    def __init__(
        self,
        progress: Progress,
        *,
        band_s: tuple[float, float] | None = None,
        memory: Callable[[], tuple[float, float]] | None = None,
        logs: Sequence[Log] = (),
        tell: Tell = lambda event: None,
        note: Callable[[Drifted], None] = lambda found: None,
        peek: Callable[[Connection], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without any data.

        `progress` must have read all lines that are passed to `read`. `band_s` and `memory` are the prediction, if
        there is one. `note` receives each reported drift. `peek` fetches from the first node the end of a file in which
        the trainer logs more than it prints.
        """
        self._progress, self._band_s, self._memory_prediction = progress, band_s, memory
        self._logs = logs or [trainer.log for trainer in TRAINERS]
        self._tell, self._note, self._peek, self._clock = tell, note, peek, clock
        self._peeked_s = clock()
        self._normal_s = band_s[1] if band_s else None
        """Step time above which a step is too long; None if nothing is predicted and there were too few steps."""
        self._reported_s = 0.0
        """Threshold that replaces `_normal_s` once a slowdown was reported; 0 before."""
        self._seen = 0
        self._first: int | None = None
        self._recent: deque[float] = deque(maxlen=_SCATTER)
        self._slowing, self._recovering = _Stretch(), _Stretch()
        self._before: deque[Interval] = deque(maxlen=_SCATTER)
        """The last intervals outside of any stretch."""
        self._peaks: list[tuple[int, float]] = []
        """Each new peak of memory, with the step at which it was reached."""
        self._is_memory_told = False
        self._data: deque[tuple[int, float]] = deque(maxlen=4 * _SCATTER)
        """Steps, and the seconds for which they waited for data."""
        self._pending: Call[None] | None = None

    @classmethod
    def of(cls, progress: Progress, spec: Spec, plan: Plan, **more: Any) -> DriftDetector:
        """Return a detector with the prediction of a plan; `more` goes to the constructor."""
        logs = (trainer_named(plan.trainer).log,) if plan.trainer else ()
        if not any(log.file for log in logs):
            more["peek"] = None
        return cls(progress, band_s=plan.time.band_s, memory=lambda: reserved_prediction(spec, plan), logs=logs, **more)

    def read(self, lines: str) -> None:
        """Read lines that a node has written, or that were found in a file of the trainer."""
        for log in self._logs:
            forms = [form for form in (log.reserved, log.data_time) if form]
            if any(form.search(lines) for form in forms):
                for piece in (piece for line in lines.split("\n") for piece in pieces(line)):
                    self._read(log, piece)

    def look(self, connections: Mapping[str, Connection]) -> None:
        """Check for drift and report it; to be called often. Hosts are asked for reasons in another thread."""
        for interval in self._new_intervals():
            found = self._check_step_time(interval)
            if found and found.state == "out":
                self._pending = Call(lambda found=found: self._report(found, load_texts(connections)))  # type: ignore[misc]
            elif found:
                self._report(found)
        if (found := self._check_memory()) is not None:
            self._report(found)
        is_free = self._pending is None or self._pending.done.is_set()
        if self._peek and connections and is_free and self._clock() - self._peeked_s > _PEEK_EVERY_S:
            self._peeked_s, peek, first = self._clock(), self._peek, next(iter(connections.values()))
            self._pending = Call(lambda: self.read(peek(first)))

    def _report(self, found: Drifted, of_hosts: Sequence[str] = ()) -> None:
        found = replace(found, reasons=(*found.reasons, *of_hosts))
        self._note(found)
        text = "\n  ".join([drift_text(found), *(found.reasons or _UNEXPLAINED.get((found.what, found.state), ()))])
        self._tell(Event(kind="drift", text=text, data=asdict(found)))

    def _read(self, log: Log, piece: str) -> None:
        named = log.steps.search(piece) if log.steps else None
        step = int(named["step"]) if named else self._progress.step
        memory, data_s = quantity(log.reserved, piece), quantity(log.data_time, piece)
        if self._first is None or step < self._first:
            return  # from an earlier run into the same directory
        if memory and memory > (self._peaks[-1][1] if self._peaks else 0.0):
            self._peaks.append((step, memory))
        if data_s:
            self._data.append((step, data_s))

    def _new_intervals(self) -> list[Interval]:
        found = [one for one in self._progress.intervals if one.last > self._seen]
        if found and self._first is None:
            self._first = found[0].last - found[0].steps
        self._seen = found[-1].last if found else self._seen
        after = (self._first or 0) + _WARM_UP
        return [one for one in found if not one.aside and one.last - one.steps >= after]

    def _check_step_time(self, interval: Interval) -> Drifted | None:
        self._recent.append(interval.each_s)
        middle = median(self._recent)
        if self._normal_s is None:
            self._before.append(interval)
            if len(self._recent) == _REFERENCE_INTERVALS:
                self._normal_s = _REFERENCE_FACTOR * middle
            return None
        scatter_s = 1.4826 * median(abs(one - middle) for one in self._recent)
        unit_s = max(scatter_s, _LEAST_SCATTER * self._normal_s)
        self._slowing.add(interval, (interval.each_s - (self._reported_s or self._normal_s)) / unit_s)
        if self._slowing.is_long:
            return self._slowdown()
        if self._reported_s:
            self._recovering.add(interval, (self._normal_s - interval.each_s) / unit_s)
            if self._recovering.is_long:
                return self._recovery()
        elif not self._slowing.steps:
            self._before.append(interval)
        return None

    def _slowdown(self) -> Drifted:
        slow, self._slowing, self._recovering = self._slowing, _Stretch(), _Stretch()
        usual_s = sum(self._band_s) / 2.0 if self._band_s else (self._normal_s or 0.0) / _REFERENCE_FACTOR
        self._reported_s = slow.each_s * (self._normal_s or 0.0) / usual_s
        steps = sum(one.steps for one in self._before)
        before = sum(one.seconds for one in self._before) / steps if steps else None
        reasons = self._data_loading_reason(slow, before or usual_s)
        return self._step_time_drift("out", slow, before=before, reasons=reasons)

    def _recovery(self) -> Drifted:
        well, self._recovering, self._slowing, self._reported_s = self._recovering, _Stretch(), _Stretch(), 0.0
        return self._step_time_drift("back", well)

    def _step_time_drift(self, state: Literal["out", "back"], stretch: _Stretch, **more: Any) -> Drifted:
        return Drifted(
            seen=now_text(),
            what="step",
            state=state,
            since_step=stretch.since,
            step=self._seen,
            value=stretch.each_s,
            band=self._band_s,
            **more,
        )

    def _data_loading_reason(self, slow: _Stretch, usual_s: float) -> tuple[str, ...]:
        """Return the reason if data loading explains the slowdown, as far as the log shows it."""
        waits = [one for step, one in self._data if step >= slow.since]
        waited = [one for step, one in self._data if step < slow.since]
        if not waits:
            return ()
        now_s, before_s = mean(waits), mean(waited) if waited else 0.0
        if now_s - before_s < _DATA_SHARE * (slow.each_s - usual_s):
            return ()
        was = f", up from {in_seconds(before_s)}" if waited else ""
        return (f"data loading: each step waits {in_seconds(now_s)} for samples{was}",)

    def _check_memory(self) -> Drifted | None:
        """Return the drift of memory beyond its band; the logged peak only rises, so it is reported immediately."""
        if self._memory_prediction is None or self._is_memory_told or not self._peaks:
            return None
        peaks, (predicted, width) = list(self._peaks), self._memory_prediction()
        step, now = peaks[-1]
        most = predicted * (1.0 + width)
        if now <= most:
            return None
        self._is_memory_told = True
        warm = peaks[0][0] + _WARM_UP
        base_step, base = max((one for one in peaks if one[0] <= warm), key=lambda one: one[1])
        rises = sum(one > base for _, one in peaks)
        grows = rises >= _RISES and now > _GROWTH * base
        reason = (
            f"memory grows: {_gib(base)} at step {base_step:,}, and it has risen {rises} times since"
            if grows
            else f"it is not growing: {_gib(base)} were already reserved at step {base_step:,}"
        )
        return Drifted(
            seen=now_text(),
            what="memory",
            state="out",
            since_step=next(step for step, one in peaks if one > most),
            step=step,
            value=now,
            band=(predicted * (1.0 - width), most),
            before=base,
            reasons=(reason,),
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def drift_text(found: Drifted) -> str:
    """Describe a drift: `steps take 4.61 s since step 431; 2.9 to 3.4 s were predicted; before, they took 3.05 s`."""
    if found.what == "memory":
        _, most = found.band or (0.0, 0.0)
        words = f"torch has reserved {_gib(found.value)} since step {found.since_step:,}"
        return f"{words}; at most {_gib(most)} were predicted"
    if found.state == "back":
        return f"steps take {in_seconds(found.value)} again, since step {found.since_step:,}"
    words = f"steps take {in_seconds(found.value)} since step {found.since_step:,}"
    if found.band is not None:
        low, high = map(in_seconds, found.band)
        words += f"; {low.removesuffix(' s')} to {high} were predicted"
    return f"{words}; before, they took {in_seconds(found.before)}" if found.before is not None else words


_UNEXPLAINED: dict[tuple[str, str], tuple[str, ...]] = {
    ("step", "out"): (
        "neither the logs nor the hosts' clocks, CPUs and disks explain it;",
        "`topoplan preflight` compares the links of the nodes",
    )
}
