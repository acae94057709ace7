"""Detect a run that has gone quiet: no step when one was due; and keep what each rank wrote last.

Ranks wait for each other, so one that hangs silences all. From outside this looks like a long evaluation or a
checkpoint; it is therefore only reported, once, and the next time only after more than the longest pause that ended by
itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from topoplan.run.events import Event
from topoplan.run.progress import Progress
from topoplan.run.rank_lines import rank_line
from topoplan.run.reachability import duration_text
from topoplan.units import in_seconds

_SEVERAL = 5
"""Number of step times without a step that is too many."""
_LEAST_S = 60.0
"""Shorter pauses are not reported, however short the steps are."""
_LOOK_S = 1.0
"""Interval at which new lines are assigned to their writers: the resolution of their ages."""
_STOPPED_S = 5.0
"""If more time passes between two checks, it was this process that was stopped."""
_READ_CHARACTERS = 16 * 1024
_OFTEN = 3
"""A rank that was seen to write this often writes all the time."""
_SHOWN_RANKS = 12
_SHOWN_COLUMNS = 80


_Writer = tuple[int, str, int | None]
"""Number and name of a node, and the rank if its lines name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLine:
    """The last line of one rank, or of a node whose lines name no rank."""

    node: int
    name: str
    """Name of the node."""
    rank: int | None
    line: str
    age_s: float | None
    """None if the line was written before this process began to watch."""


class SilenceDetector:
    """Keeps track of who wrote when, from the lines of all nodes."""

    def __init__(
        self, progress: Progress, *, ranks_per_node: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start before the first line. `progress` must have read all lines that are passed to `read`."""
        self._progress, self._ranks, self._clock = progress, ranks_per_node, clock
        self._step = 0
        self._alive_since_s = self._looked_s = clock()
        self._reported_s: float | None = None
        self._longest_s = 0.0
        self._new: dict[tuple[int, str], str] = {}
        self._last: dict[_Writer, tuple[str, float | None]] = {}
        self._often: Counter[_Writer] = Counter()

    def read(self, node: int, name: str, lines: str, *, past: bool = False) -> None:
        """Read lines of a node. After the first step only steps and moving progress bars are signs of life."""
        step = self._progress.step
        if step and not self._step:
            self._often.clear()  # at the start every rank has something to write
        if step != self._step or not self._progress.is_under_way or "%|" in lines:
            self._step = step
            self.restart()
        self._new[node, name] = (self._new.get((node, name), "") + lines[-_READ_CHARACTERS:])[-_READ_CHARACTERS:]
        if past:
            self._assign(None)

    def restart(self) -> None:
        """Start the silence anew from now."""
        now_s = self._clock()
        if self._reported_s is not None:
            self._longest_s, self._reported_s = max(self._longest_s, now_s - self._alive_since_s), None
        self._alive_since_s = now_s

    @property
    def is_reported(self) -> bool:
        """Whether the silence was reported and still lasts."""
        return self._reported_s is not None

    @property
    def quiet_s(self) -> float:
        """Seconds without a sign of life."""
        return self._clock() - self._alive_since_s

    @property
    def patience_s(self) -> float:
        """Seconds without a sign of life that are tolerated."""
        if not self._progress.is_under_way:
            return max(self._progress.start_up_s, 2 * self._longest_s)
        return max(_LEAST_S, _SEVERAL * self._progress.pace_s, 2 * self._longest_s)

    def look(self, *, at_most_s: float | None = None) -> Event | None:
        """Return the report to make once the silence exceeds `patience_s` or `at_most_s`, else None; call often."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return None
        if now_s - self._looked_s > _STOPPED_S:
            self.restart()
        self._looked_s = now_s
        self._assign(now_s)
        limit_s = self.patience_s if at_most_s is None else min(self.patience_s, at_most_s)
        if self._reported_s is not None or self.quiet_s < limit_s:
            return None
        self._reported_s = now_s
        return self._event()

    def last_lines(self) -> list[LastLine]:
        """Return the last lines, oldest first; a line without a rank only for nodes on which no rank has written."""
        now_s = self._clock()
        ranked = {node for node, _, rank in self._last if rank is not None}
        found = [
            LastLine(node=node, name=name, rank=rank, line=line, age_s=None if at_s is None else now_s - at_s)
            for (node, name, rank), (line, at_s) in self._last.items()
            if rank is not None or node not in ranked
        ]
        return sorted(found, key=lambda one: (one.age_s is not None, -(one.age_s or 0.0), one.node, one.rank or 0))

    def suspect(self) -> LastLine | None:
        """Return the rank that wrote regularly and stopped clearly before the other regular writers, if any."""
        found = [one for one in self.last_lines() if self._often[one.node, one.name, one.rank] >= _OFTEN]
        if len(found) < 2:
            return None
        first, second = (one.age_s or 0.0 for one in found[:2])
        return found[0] if first > 2 * second + 2 * _LOOK_S else None

    def _assign(self, at_s: float | None) -> None:
        for (node, name), lines in self._new.items():
            seen: set[int | None] = set()
            for text in reversed(lines.split("\n")):
                line = rank_line(text)
                if not line.text.strip():
                    continue
                rank = line.rank_of(node, self._ranks) if self._ranks else line.rank
                if rank not in seen:
                    seen.add(rank)
                    self._last[node, name, rank] = line.text.strip(), at_s
                    self._often[node, name, rank] += 1
        self._new.clear()

    def _event(self) -> Event:
        last_lines, step = self.last_lines(), self._progress.step
        if self._progress.is_under_way:
            due = f"after step {step:,}; one takes {in_seconds(self._progress.pace_s)}" if self._progress.pace_s else ""
            text = f"no step for {duration_text(self.quiet_s)}{f' ({due})' if due else ''}"
        else:
            text = f"no output for {duration_text(self.quiet_s)}, and no step yet"
        ranks = list(map(_values, last_lines))
        data: dict[str, Any] = {"quiet_s": round(self.quiet_s, 1), "step": step, "ranks": ranks}
        last = "; the last lines:" if last_lines else ""
        return Event(kind="silence", text="\n".join([f"{text}{last}", *_line_texts(last_lines)]), data=data)


def _values(one: LastLine) -> dict[str, Any]:
    age_s = None if one.age_s is None else round(one.age_s, 1)
    return {"node": one.name, "rank": one.rank, "line": one.line, "age_s": age_s}


def _line_texts(last_lines: list[LastLine]) -> Iterator[str]:
    for one in last_lines[:_SHOWN_RANKS]:
        who = one.name if one.rank is None else f"{one.name} rank {one.rank}"
        ago = "earlier" if one.age_s is None else f"{duration_text(one.age_s)} ago"
        line = f"  {who}, {ago}: {one.line}"
        yield line if len(line) <= _SHOWN_COLUMNS else f"{line[: _SHOWN_COLUMNS - 3]}..."
    if len(last_lines) > _SHOWN_RANKS:
        yield f"  and {len(last_lines) - _SHOWN_RANKS} more that wrote later"
