"""The data of a prediction, of a rejection and of a ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import NamedTuple, overload

from topoplan.engines.prediction import Memory, StageMemory, Time
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec

__all__ = ["Counts", "Memory", "Plan", "Plans", "Ranked", "Ranking", "Rejection", "StageMemory", "Time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout with its predicted memory and time."""

    layout: Layout
    memory: Memory
    time: Time
    tokens_per_s_per_gpu: float
    """Tokens of the sequences in a step, per second and GPU; padding is not counted if lengths are known."""
    model_flops_per_s_per_gpu: float
    """Model FLOP/s, without recomputation."""
    mfu: float
    """model_flops_per_s_per_gpu over the card's dense peak at the job's precision."""
    trainer: str | None = None
    """The trainer that the plan is computed and written for; None if no trainer can run it."""
    warnings: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    """Known problems, in sentences that also appear in `warnings` or in the warnings of the plan's bundle."""
    padding_share: float | None = None
    """Fraction of a step's positions that are padding; None if the lengths of the samples are unknown."""

    @property
    def id(self) -> str:
        """Short, stable name of the layout."""
        return self.layout.id

    @property
    def fits(self) -> bool:
        """Whether the memory is within the card, less its margin."""
        return self.memory.fits


class Candidate(NamedTuple):
    """A layout that fits, with what the order of plans depends on."""

    layout: Layout
    memory: Memory
    tokens_per_s_per_gpu: float
    caveats: tuple[str, ...]

    @property
    def id(self) -> str:
        """Short, stable name of the layout."""
        return self.layout.id


Ranked = Plan | Candidate


class Plans(Sequence[Plan]):
    """Plans in order, each built when it is first accessed: a search finds thousands, and few are read."""

    def __init__(self, layouts: Sequence[Layout], plan: Callable[[int], Plan]) -> None:
        """`plan` returns the plan for an index into `layouts`, from 0."""
        self.layouts = layouts
        self._plan, self._known = plan, dict[int, Plan]()
        self._places = range(len(layouts))

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Plan: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, place: int | slice) -> Plan | tuple[Plan, ...]:
        """Return the plan at an index, or a tuple of plans for a slice."""
        if isinstance(place, slice):
            return tuple(self[each] for each in self._places[place])
        place = self._places[place]
        if place not in self._known:
            self._known[place] = self._plan(place)
        return self._known[place]

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a sequence of equal plans."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A layout that is not ranked, and why."""

    layout: Layout
    rule: str
    """Name of the rule, or `memory`."""
    reason: str
    """The failed equation with its numbers, or the stage and the GiB by which it exceeds the card."""
    fix: str = ""
    """The nearest change that would make the layout legal or make it fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many layouts a search met, by outcome; the other counts add up to `candidates`."""

    candidates: int = 0
    illegal: int = 0
    out_of_memory: int = 0
    dominated: int = 0
    """Slower than a ranked layout that differs only in pipeline split, recomputation and offload, or too large; the
    safe plan may be such a layout, and is counted as ranked."""
    ranked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a way out changes, as options of the command line."""

    kind: str
    """`nodes`, `lora` and so on: a key of `planner.ways_out.KINDS`."""
    words: str
    sets: tuple[str, ...] = ()
    """Values of `--set`."""
    pins: tuple[str, ...] = ()
    """Values of `--pin`."""
    backend: str | None = None
    """Value of `--backend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A change with which a job fits, or one with which it does not fit either."""

    change: Change
    plan: Plan | None = None
    reason: str = ""
    """Why there is no plan."""
    unfinished: str = ""
    """Why not all searches of this way were completed: TOO_LONG or STOPPED; empty if they were."""
    command: str = ""
    """The shell command that ranks the changed job."""


TOO_LONG, STOPPED = "it takes too long", "it was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Result of a search. `plans` is sorted, best first."""

    spec: Spec
    plans: Plans
    counts: Counts
    elapsed_s: float
    safe: int | None = None
    """Index, from 0, of the fastest plan that has no caveat and memory to spare; None if there is none."""
    searched: float = 1.0
    """Fraction of the search that was completed; 1 unless it was stopped."""
    rejected: tuple[Rejection, ...] = ()
    """All rejections if they were asked for, otherwise only the nearest misses."""
    notes: tuple[str, ...] = field(default=())
    """Sentences on what the usual alternatives would cost."""
    profile_notes: tuple[str, ...] = ()
    """Sentences on what a calibrated profile changes."""
    crossings: tuple[str, ...] = ()
    """Sentences on the other backends and trainers: what switching to each costs and gains, or why it has no plan."""
    data_notes: tuple[str, ...] = ()
    """Sentences on the lengths of the samples and how the best plan handles them; empty if the lengths are unknown."""
    searched_backends: tuple[str, ...] = ()
    """Backends that were searched, or that cannot run the job."""
    ways_out: tuple[WayOut, ...] = ()
    """If nothing fits, or nothing with memory to spare: what would, as far as it was asked for."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the search, or one of the searches for ways out, was stopped by Ctrl-C."""
        return self.searched < 1.0 or any(way.unfinished == STOPPED for way in self.ways_out)
