"""One optimizer step as events in time, for any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FORWARD, RECOMPUTE, BACKWARD, P2P = "forward", "recompute", "backward", "p2p"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One piece of work that occupies a pipeline rank or a lane."""

    rank: int
    """Pipeline rank, or index of a lane."""
    chunk: int
    """Model chunk of the rank; its virtual stage is chunk * pp + rank."""
    microbatch: int
    kind: str
    """In a pipeline: forward, recompute (what backward repeats, just before it), backward, or p2p (waiting for a
    message in transit). Lanes have further kinds (`engines/data_parallel/timeline.py`)."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What all ranks do before or after the pipeline."""

    name: str
    """reference, gradient reduce, optimizer or parameter gather; in a `CommunicationSpans`, also layer collectives."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationSpans:
    """When one rank communicates, whether or not computation hides it."""

    name: str
    """`in layers`, or `of states`: gradients and weights."""
    rank: int
    """Pipeline rank: the busiest one, or for `of states` the one that has most of them to send."""
    spans: tuple[Phase, ...]
    """Collectives in time: layer collectives, gradient reduce or parameter gather."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by kind of collective."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.name] = found.get(span.name, 0.0) + span.end_s - span.start_s
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One optimizer step; all times are seconds from its start."""

    ranks: int
    """Number of pipeline ranks, or of lanes."""
    chunks: int
    """Model chunks per rank."""
    microbatches: int
    events: tuple[Event, ...]
    """Events of the pipeline, by rank, then in time."""
    phases: tuple[Phase, ...]
    """Phases before and after the pipeline, in time. Those of gradients and weights last only as long as what is not
    hidden."""
    pipeline_start_s: float
    pipeline_end_s: float
    total_s: float
    closed_form_s: float
    """Seconds of the pipeline by the closed form, which the ranking uses."""
    communications: tuple[CommunicationSpans, ...] = ()
    """Collectives beside a pipeline, of its busiest rank; with lanes, collectives are among the events instead."""
    lanes: tuple[str, ...] = ()
    """For data-parallel engines, the parts of a GPU and its host that `rank` indexes, and the pipeline is the whole
    step; empty otherwise."""

    @property
    def pipeline_s(self) -> float:
        """Seconds of the simulated pipeline."""
        return self.pipeline_end_s - self.pipeline_start_s

    @property
    def deviation(self) -> float:
        """Relative deviation of the closed form from the simulation: their ratio minus one."""
        return self.closed_form_s / self.pipeline_s - 1.0

    def by_rank(self) -> list[list[Event]]:
        """Return the events of each rank."""
        events: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            events[event.rank].append(event)
        return events

    @property
    def busy(self) -> tuple[Mapping[str, float], ...]:
        """For each rank, seconds by kind of event plus `idle`, which together add up to `pipeline_s`."""
        busy: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        for event in self.events:
            mine = busy[event.rank]
            mine[event.kind] = mine.get(event.kind, 0.0) + event.end_s - event.start_s
        for mine in busy:
            mine["idle"] = max(0.0, self.pipeline_s - sum(mine.values()))
        return tuple(busy)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each rank, the fraction of the pipeline's time in which it is idle: its bubble."""
        return tuple(mine["idle"] / self.pipeline_s for mine in self.busy)

    @property
    def fill_s(self) -> float:
        """Seconds from the start of the step until every rank has run its first backward."""
        return max(max(one.end_s for one in run) for run in self._runs(BACKWARD, min))

    @property
    def drain_s(self) -> float:
        """Seconds from the start of the step to the earliest start of a rank's last forward; the drain follows."""
        return min(min(one.start_s for one in run) for run in self._runs(FORWARD, max))

    def _runs(self, kind: str, which: Callable[..., Event]) -> list[list[Event]]:
        """For each rank with events of this kind, return all events of its first or last forward or backward.

        `which` (min or max) picks by start time.
        """
        found = []
        for events in self.by_rank():
            if mine := [event for event in events if event.kind == kind]:
                one = which(mine, key=lambda event: event.start_s)
                found.append([e for e in mine if (e.chunk, e.microbatch) == (one.chunk, one.microbatch)])
        return found
